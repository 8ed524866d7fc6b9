"""Lengths of time for a person's eyes."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Two units at most, as 45s, 3m20s, 5h12m, 4d3h."""
    whole = max(0, round(seconds))
    for size, unit, next_size, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size}{unit}" + (f"{rest}{next_unit}" if rest else "")
    return f"{whole}s"
