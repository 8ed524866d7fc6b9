"""Formats of tensor files, of this project and of others. No torch, no storage."""
