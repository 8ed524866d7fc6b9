"""Rollbacks of a job, and the states that they have made invalid."""

from __future__ import annotations

import dataclasses
from typing import Tuple

MOST_UNDONE = 16
"""Maximum number of rollbacks that are recorded. The states that older rollbacks made invalid no longer exist."""


@dataclasses.dataclass(frozen=True)
class Undone:
    """Rollback that makes invalid all states of rounds up to `round` whose step is later than `step`.

    A round is a period in which a fixed set of replicas trains.
    """

    round: int
    step: int

    def covers(self, round: int, step: int) -> bool:
        """Return whether this rollback makes the state of a round and step invalid."""
        return round <= self.round and step > self.step


def joined(old: Tuple[Undone, ...], more: Undone) -> Tuple[Undone, ...]:
    """Return the rollbacks `old` and `more` together, sorted by round and step.

    A rollback is left out if another of these rollbacks makes the same states invalid.
    """
    if any(undone.round >= more.round and undone.step <= more.step for undone in old):
        return old
    uncovered = [undone for undone in old if not (undone.round <= more.round and undone.step >= more.step)]
    return tuple(sorted([*uncovered, more], key=lambda undone: undone.round)[-MOST_UNDONE:])
