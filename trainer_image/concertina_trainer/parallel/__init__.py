"""Ranks, and what they add up together."""
