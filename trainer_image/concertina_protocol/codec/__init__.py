"""Conversion between dataclasses and lines of JSON."""
