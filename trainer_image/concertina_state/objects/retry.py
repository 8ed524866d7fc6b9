"""Short retries of what a store refuses.

A refusal can be temporary: a token is being exchanged, or an object is not visible yet (decision "Away, or refused").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import StoreRefused

GRACE = (0.5, 2.0)
"""Seconds between attempts. A request that is still refused at the last attempt is refused for good."""
T = TypeVar("T")


def tries() -> Iterator[None]:
    """Yield once for each attempt, with the waits between them."""
    yield
    for wait in GRACE:
        time.sleep(wait)
        yield


def final(ask: Callable[[], T]) -> T:
    """Return what `ask` returns, after retries if the store refuses.

    Raises:
        InvalidInput: When the store still refuses at the last attempt.
    """
    refused: StoreRefused | None = None
    for _ in tries():
        try:
            return ask()
        except StoreRefused as error:
            refused = error
    raise InvalidInput(str(refused)) from refused
