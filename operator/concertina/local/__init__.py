"""The embedded local cluster."""
