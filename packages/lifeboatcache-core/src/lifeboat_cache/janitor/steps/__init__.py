"""What a janitor does in a run, one after the other."""
