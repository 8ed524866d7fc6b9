"""Failures of a job, and how the operator recovers from them."""
