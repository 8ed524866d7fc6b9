"""A training state, as far as it matters here: which round made which steps, of which samples, what was left out."""

from __future__ import annotations

from typing import NamedTuple

from concertina_protocol import Undone
from concertina_protocol.messages.ranges import Ranges, united
from concertina_state.format.shardfile import Trend
from concertina_trainer.data.read.skips import positions
from simulation.parts.clock import Violation

BATCH = 4
"""Samples of a step."""


class Lineage(NamedTuple):
    rounds: tuple[tuple[int, int, int], ...] = ()
    """(round, steps before, steps after) for each round that trained it."""
    trained: Ranges = ()
    """Positions of the samples that it was trained on."""
    skipped: Ranges = ()
    """Positions left out, as the state says itself."""
    trend: Trend = Trend()

    def stepped(self, round: int, samples: Ranges, skipped: Ranges, trend: Trend) -> Lineage:
        """After one more step, in that round."""
        step, begun = steps_of(self) + 1, self.rounds
        if begun and begun[-1][0] == round:
            rounds = (*begun[:-1], (round, begun[-1][1], step))
        else:
            rounds = (*begun, (round, step - 1, step))
        return Lineage(rounds, united(self.trained, samples), skipped, trend)

    def comes_from(self, undone: Undone) -> bool:
        """Whether a state that was undone is among those that it went through."""
        return any(undone.covers(round, after) for round, _, after in self.rounds)


FRESH = Lineage()


def steps_of(lineage: Lineage) -> int:
    return lineage.rounds[-1][2] if lineage.rounds else 0


def check_lineage(lineage: Lineage, skipped: Ranges | None = None) -> None:
    """The consumed samples, in order, are 0, 1, 2, ...: each round goes on where the one before stopped, and each
    position is trained on once or left out. `skipped`: instead of what the state itself says was left out."""
    at, last = 0, 0
    for round, before, after in lineage.rounds:
        if before != at or after <= before or round <= last:
            raise Violation(f"steps skipped or repeated: {lineage}")
        at, last = after, round
    left_out = lineage.skipped if skipped is None else skipped
    if lineage.trained != united(positions(0, at * BATCH, left_out)):
        raise Violation(f"positions skipped or repeated, {left_out} being left out: {lineage}")
