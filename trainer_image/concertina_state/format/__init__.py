"""Formats of tensor files, of this project and of others. The package imports neither torch nor a storage client."""
