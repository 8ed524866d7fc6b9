"""Judgement of a step by the ranks of one round: the trainer's own rules for losses, and the rank that digests name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from concertina_protocol import Restore
from concertina_protocol.messages.ranges import Ranges, united
from concertina_trainer.data.read.skips import positions
from concertina_trainer.errors import RollBack
from concertina_trainer.training.anomalies import Anomalies
from simulation.parts.lineage import BATCH, Lineage, steps_of

if TYPE_CHECKING:
    from simulation.runs.world import World

USUAL = 1.0
"""Loss of a normal batch."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """Values that all ranks agree on."""

    loss: float
    squared_norm: float = 1.0


class Judge:
    def __init__(self, world: World, restore: Restore, lineage: Lineage) -> None:
        """Initialize the judge. Raises InvalidInput if more samples were skipped than can be recorded."""
        config = world.cluster.spec.trainer
        assert config is not None
        self.anomalies = Anomalies(config, united(lineage.skipped, restore.skipped), lineage.trend)
        self._spoilt, self._every = world.spoilt, config.anomalies.corruption_check_steps
        self._agreed = steps_of(lineage)
        self.glitch: float | None = None
        """Loss of the next step, regardless of its samples."""
        self.flipped = ""
        """Replica in whose memory bits have changed since the last check."""

    def step(self, lineage: Lineage) -> tuple[Ranges, str]:
        """Return the samples of the next step, and why they are skipped; empty if they are trained on.

        Raises the errors of Anomalies.
        """
        done = steps_of(lineage)
        if self._every and done % self._every == 0:
            self._compare(done)
        samples = positions(done * BATCH, (done + 1) * BATCH, self.anomalies.skipped)
        loss = self.glitch if self.glitch is not None else self._loss(samples)
        self.glitch = None
        return samples, self.anomalies.skips(done, done * BATCH, Seen(loss))

    def _compare(self, done: int) -> None:
        if self.flipped:
            sentence = f"silent corruption detected after step {done}: {self.flipped} has changed"
            raise RollBack("SilentCorruption", sentence, self._agreed, self.anomalies.skipped)
        self._agreed = done

    def _loss(self, samples: Ranges) -> float:
        hit = (loss for at, loss in self._spoilt.items() if any(begin <= at < end for begin, end in samples))
        return next(hit, USUAL)
