"""States that rollbacks have made void, and the union of several rollbacks."""

from __future__ import annotations

import dataclasses
from typing import Tuple

MOST_UNDONE = 16
"""Number of rollbacks that are remembered. States before the oldest one no longer exist."""


@dataclasses.dataclass(frozen=True)
class Undone:
    """Rollback that makes states of rounds up to `round` beyond `step` void."""

    round: int
    step: int

    def covers(self, round: int, step: int) -> bool:
        """Return whether this rollback makes the state of a round and step void."""
        return round <= self.round and step > self.step


def joined(old: Tuple[Undone, ...], more: Undone) -> Tuple[Undone, ...]:
    """Return the rollbacks in order of their rounds and steps, without those that another one covers."""
    if any(undone.round >= more.round and undone.step <= more.step for undone in old):
        return old
    uncovered = [undone for undone in old if not (undone.round <= more.round and undone.step >= more.step)]
    return tuple(sorted([*uncovered, more], key=lambda undone: undone.round)[-MOST_UNDONE:])
