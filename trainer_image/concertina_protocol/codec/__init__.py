"""Dataclasses as JSON, one a line."""
