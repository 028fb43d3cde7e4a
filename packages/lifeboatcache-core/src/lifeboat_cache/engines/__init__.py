"""What adapters have in common: the switch, and what a launch must not suffer from."""
