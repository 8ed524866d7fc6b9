"""Waiting for other processes and tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
GIVE_UP = 150.0
"""Time limit in seconds. It is only a limit, not an expectation."""


def until(
    condition: Callable[[], T],
    what: str,
    seen: Callable[[], object] | None = None,
    limit: float = GIVE_UP,
    pause: float = 0.1,
) -> T:
    """Return the condition's first truthy value.

    At the end of the time, the error names `what` was awaited, and what was `seen` last: by default, the condition's
    value.
    """
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
    """Return the condition's first truthy value, while other tasks of this event loop run."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, late(what, limit, seen() if seen else value)
        await asyncio.sleep(pause)
    return value


def late(what: str, limit: float, seen: object) -> str:
    return f"{what} did not come within {limit:g} s; last seen: {seen}"
