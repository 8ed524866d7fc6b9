"""Samples of a step, and their tokens."""
