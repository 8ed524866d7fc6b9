"""Training loop, and what it does between two steps."""
