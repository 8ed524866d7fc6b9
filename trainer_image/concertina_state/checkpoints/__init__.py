"""Checkpoints in durable storage: their shards and manifests, the object LATEST, and the deletion of old checkpoints.

The package does not import torch.
"""
