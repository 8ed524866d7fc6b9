"""Choose the training state from which a round starts, and the members that hold copies of it."""
