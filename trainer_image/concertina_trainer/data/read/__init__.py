"""Which samples a step has, and their tokens."""
