"""Training state, reduced to its history: the steps and samples of each round, and the skipped samples."""

from __future__ import annotations

from typing import NamedTuple

from concertina_protocol import Undone
from concertina_protocol.messages.ranges import Ranges, united
from concertina_state.format.shardfile import Trend
from concertina_trainer.data.read.skips import positions
from simulation.parts.clock import Violation

BATCH = 4
"""Number of samples in a step."""


class Lineage(NamedTuple):
    rounds: tuple[tuple[int, int, int], ...] = ()
    """Triples (round, steps before, steps after) of the rounds that trained the state."""
    trained: Ranges = ()
    """Positions of the samples that the state was trained on."""
    skipped: Ranges = ()
    """Skipped positions according to the state itself."""
    trend: Trend = Trend()

    def stepped(self, round: int, samples: Ranges, skipped: Ranges, trend: Trend) -> Lineage:
        """Return the state after one more step in that round."""
        step, begun = steps_of(self) + 1, self.rounds
        if begun and begun[-1][0] == round:
            rounds = (*begun[:-1], (round, begun[-1][1], step))
        else:
            rounds = (*begun, (round, step - 1, step))
        return Lineage(rounds, united(self.trained, samples), skipped, trend)

    def comes_from(self, undone: Undone) -> bool:
        """Return whether the state was trained from one that was undone."""
        return any(undone.covers(round, after) for round, _, after in self.rounds)


FRESH = Lineage()


def steps_of(lineage: Lineage) -> int:
    return lineage.rounds[-1][2] if lineage.rounds else 0


def check_lineage(lineage: Lineage, skipped: Ranges | None = None) -> None:
    """Check that each position was trained on once or skipped, in order: 0, 1, 2, ...

    Each round continues where the previous one stopped. `skipped` replaces what the state itself says was skipped.

    Raises:
        Violation: If it does not hold.
    """
    at, last = 0, 0
    for round, before, after in lineage.rounds:
        if before != at or after <= before or round <= last:
            raise Violation(f"steps skipped or repeated: {lineage}")
        at, last = after, round
    left_out = lineage.skipped if skipped is None else skipped
    if lineage.trained != united(positions(0, at * BATCH, left_out)):
        raise Violation(f"positions skipped or repeated, {left_out} being left out: {lineage}")
