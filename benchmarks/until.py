"""Function that waits for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: str, limit: float, check: Callable[[], Any]) -> Any:
    """Call `check` until its result is truthy, and return that result. `what` describes the condition.

    Raises:
        TimeoutError: When that takes longer than `limit` seconds. The message contains `what`.
    """
    give_up = time.monotonic() + limit
    while time.monotonic() < give_up:
        if answer := check():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {limit:.0f} s")
