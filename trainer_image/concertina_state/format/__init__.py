"""Formats of tensor files. The package imports neither torch nor a storage client."""
