"""Timers of the caches: calls by the event loop, or at once where there is none."""

from __future__ import annotations

from collections.abc import Callable

Later = Callable[[float, Callable[[], None]], object]
"""Function that calls another one after a number of seconds, such as `loop.call_later`."""


def at_once(seconds: float, act: Callable[[], None]) -> None:
    """Call without a delay: the `Later` of a cache without an event loop."""
    act()
