"""State of a rank in the bundled trainer: weights and optimizer moments, and how they are restored."""
