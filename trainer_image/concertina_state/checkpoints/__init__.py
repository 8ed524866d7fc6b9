"""Durable checkpoints: their shards and manifests, the object LATEST, and the retention of old checkpoints.

The package does not import torch.
"""
