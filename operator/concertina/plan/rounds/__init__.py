"""Transitions from one round to the next: claims, commits and drains."""
