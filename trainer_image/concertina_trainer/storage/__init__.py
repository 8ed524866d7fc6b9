"""Checkpoints in durable storage, by URI. No module here needs torch."""
