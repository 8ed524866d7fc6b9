"""Waiting for what a job does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: str, limit: float, check: Callable[[], Any]) -> Any:
    """The first truthy answer of check(); raises TimeoutError with `what` after `limit` seconds."""
    give_up = time.monotonic() + limit
    while time.monotonic() < give_up:
        if answer := check():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {limit:.0f} s")
