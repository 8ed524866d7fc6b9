"""Processes that an agent starts and ends."""
