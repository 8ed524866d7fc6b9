"""Quota of a job that has a queue of Kueue: what it asks for, how many pods it may have, and what it gives back."""
