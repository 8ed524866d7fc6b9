"""Snapshots in the volume, and what has been seen."""
