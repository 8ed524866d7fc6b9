"""How long what a store refuses is asked for again: a token may just be exchanged, an object not be visible yet
(decision "Away, or refused")."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import StoreRefused

GRACE = (0.5, 2.0)
"""Seconds from one try to the next; what is still refused after the last one is refused for good."""
T = TypeVar("T")


def tries() -> Iterator[None]:
    """One after the other, with the waits between them."""
    yield
    for wait in GRACE:
        time.sleep(wait)
        yield


def final(ask: Callable[[], T]) -> T:
    """What it returns. Raises InvalidInput where it is refused for good."""
    refused: StoreRefused | None = None
    for _ in tries():
        try:
            return ask()
        except StoreRefused as error:
            refused = error
    raise InvalidInput(str(refused)) from refused
