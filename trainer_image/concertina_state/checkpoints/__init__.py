"""Durable checkpoints: shards, manifests, LATEST, what is kept. No torch."""
