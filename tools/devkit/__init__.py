"""What ``tools/dev.py`` is made of: environments, the model, checks, the demonstration."""
