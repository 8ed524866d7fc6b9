"""Reading of the samples of each step, and division of a batch among ranks."""
