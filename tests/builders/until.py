"""Waiting for what other processes and tasks do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
GIVE_UP = 150.0
"""Seconds; only a limit, no expectation."""


def until(
    condition: Callable[[], T],
    what: str,
    seen: Callable[[], object] | None = None,
    limit: float = GIVE_UP,
    pause: float = 0.1,
) -> T:
    """The condition's first truthy value. When time is over, `what` was awaited is said, and what was `seen` last: the
    condition's value where nothing else is given."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, late(what, limit, seen() if seen else value)
        time.sleep(pause)
    return value


async def until_async(
    condition: Callable[[], T],
    what: str,
    seen: Callable[[], object] | None = None,
    limit: float = GIVE_UP,
    pause: float = 0.005,
) -> T:
    """The same for tasks of this event loop."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, late(what, limit, seen() if seen else value)
        await asyncio.sleep(pause)
    return value


def late(what: str, limit: float, seen: object) -> str:
    return f"{what} did not come within {limit:g} s; last seen: {seen}"
