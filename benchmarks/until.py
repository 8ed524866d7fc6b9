"""Waiting for a condition of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: str, limit: float, check: Callable[[], Any]) -> Any:
    """Return the first truthy result of check().

    Raises:
        TimeoutError: After `limit` seconds, with `what` as the message.
    """
    give_up = time.monotonic() + limit
    while time.monotonic() < give_up:
        if answer := check():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {limit:.0f} s")
