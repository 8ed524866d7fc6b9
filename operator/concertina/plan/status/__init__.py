"""Compute the status that a planning pass writes: conditions, progress, time accounting, and traces of rounds."""
