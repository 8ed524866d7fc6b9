"""Failures, and the operator's response to them."""
