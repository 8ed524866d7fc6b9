"""Snapshots in the volume, and the highest round that the agent has seen."""
