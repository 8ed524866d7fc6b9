"""Compute the status that a planning pass writes."""
