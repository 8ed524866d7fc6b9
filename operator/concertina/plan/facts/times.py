"""How long ago something was, by clocks that differ."""

from __future__ import annotations

import math

SKEW = 10.0
"""Seconds by which the clocks of two machines, and so of two operators, may differ."""


def since(at: float, now: float) -> float:
    """Seconds. Without end for what lies ahead: the clock was set back, and nothing may wait for it to get there
    again."""
    seconds = now - at
    return seconds if seconds > -SKEW else math.inf
