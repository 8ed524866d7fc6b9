"""Durable checkpoints: parts, manifests, LATEST, what is kept. No torch."""
