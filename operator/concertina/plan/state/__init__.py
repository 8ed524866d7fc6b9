"""Locations of training state, and the choice of the state that a round starts from."""
