"""Timers of the caches. Calls are scheduled in the event loop, or made at once without an event loop."""

from __future__ import annotations

from collections.abc import Callable

Later = Callable[[float, Callable[[], None]], object]
"""Function that calls another function after a number of seconds, such as `loop.call_later`."""


def at_once(seconds: float, act: Callable[[], None]) -> None:
    """Call `act` without a delay. Caches that have no event loop use this as their `Later`."""
    act()
