"""Type of the functions that schedule calls for the caches, and such a function that calls at once."""

from __future__ import annotations

from collections.abc import Callable

Later = Callable[[float, Callable[[], None]], object]
"""Function that schedules a call of another function after a number of seconds, such as `loop.call_later`."""


def at_once(seconds: float, act: Callable[[], None]) -> None:
    """Call `act` at once instead of after a delay. Caches that have no event loop use this function as their timer."""
    act()
