"""Garbage collection at the same steps on all ranks.

A garbage collection stops a rank for up to some hundred milliseconds. By default, each rank collects at a different
time, when it has created enough objects. The other ranks then wait for this rank in their next collective.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

EVERY_STEPS = 50
"""Number of steps between two collections, as in torchtitan."""
YOUNG = 1
"""Oldest generation to collect.

Objects that survive two collections, such as the model, are in the next older generation. A collection of that
generation takes longest, and happens only at the end of a round.
"""


@contextlib.contextmanager
def scheduled() -> Iterator[None]:
    """Return a context in which Python collects garbage only when `after` is called."""
    gc.collect(YOUNG)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def after(step: int) -> None:
    """Collect garbage, if it is due after `step` finished steps."""
    if step % EVERY_STEPS == 0:
        gc.collect(YOUNG)
