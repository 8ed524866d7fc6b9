"""Retries of a refused request, for a few seconds.

A refusal can be temporary. For example, a token is just being exchanged, or an object is not visible yet (decision
"Unavailable storage and refused access").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import StoreRefused

GRACE = (0.5, 2.0)
"""Seconds to wait between attempts. If the store still refuses at the last attempt, the refusal is final."""
T = TypeVar("T")


def tries() -> Iterator[None]:
    """Yield once for each attempt at a request, and wait between attempts."""
    yield
    for wait in GRACE:
        time.sleep(wait)
        yield


def final(ask: Callable[[], T]) -> T:
    """Return the result of the request `ask`. If the store refuses the request, try again for a few seconds.

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
