"""Text for durations, such as 3m20s."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a duration in at most two units, such as 45s, 3m20s, 5h12m or 4d3h.

    Negative durations give 0s.
    """
    total = max(0, round(seconds))
    for size, unit, next_size, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if total >= size:
            remainder = total % size // next_size
            return f"{total // size}{unit}" + (f"{remainder}{next_unit}" if remainder else "")
    return f"{total}s"
