"""What rollbacks have made void, and what several have together."""

from __future__ import annotations

import dataclasses
from typing import Tuple

MOST_UNDONE = 16
"""Rollbacks that are remembered: states of before the oldest one are long gone."""


@dataclasses.dataclass(frozen=True)
class Undone:
    """States of rounds up to `round` beyond `step` are void: the world went back from them."""

    round: int
    step: int

    def covers(self, round: int, step: int) -> bool:
        return round <= self.round and step > self.step


def joined(old: Tuple[Undone, ...], more: Undone) -> Tuple[Undone, ...]:
    """By rising rounds and steps; what another one covers as well is left out."""
    if any(some.round >= more.round and some.step <= more.step for some in old):
        return old
    kept = [some for some in old if not (some.round <= more.round and some.step >= more.step)]
    return tuple(sorted([*kept, more], key=lambda some: some.round)[-MOST_UNDONE:])
