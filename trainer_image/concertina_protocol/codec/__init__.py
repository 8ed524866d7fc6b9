"""Conversion of dataclasses to JSON, one object a line."""
