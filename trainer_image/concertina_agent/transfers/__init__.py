"""Copies of a peer's snapshots, parts to storage, and the round's store."""
