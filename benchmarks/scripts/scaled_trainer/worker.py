"""Worker of the bundled trainer that records its step times and its memory, and exits after some steps."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from concertina_protocol.worker_channel import Done
from concertina_trainer import worker
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.planning.ledger import Ledger, MemoryKind
from concertina_trainer.training.engine import Engine
from concertina_trainer.training.loop import TrainingRun
from concertina_trainer.training.progress_report import Reporter, StepInfo

sys.path.append(str(Path(__file__).parents[1]))
from notes import Notes


class CountedEngine:
    """Engine that measures the memory of its first step with the plan's ledger.

    The time of that step is not recorded.
    """

    def __init__(self, engine: Engine, optimizer: LocalOptimizer, notes: Notes) -> None:
        self._engine, self._optimizer, self._notes = engine, optimizer, notes
        self.losses = engine.losses

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        if self._notes.facts:
            return self._engine.forward_backward(microbatches)
        ledger = Ledger(None)
        with ledger.resizing(), ledger:
            ledger.mark(MemoryKind.weights, list(self._optimizer._local.values()))
            for moments in self._optimizer.moments().values():
                ledger.mark(MemoryKind.moments, list(moments.values()))
            losses = self._engine.forward_backward(microbatches)
        self._notes.facts["tensors"] = max(sum(kinds.values()) for kinds in ledger.peaks.values())
        return losses


def main() -> None:
    notes, step, train = Notes(), Reporter.step, worker.train

    def noted(self: Reporter, info: StepInfo) -> None:
        step(self, info)
        assert self._round is not None
        notes.facts["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if notes.add(self._round.times.waiting):
            os._exit(0)

    def counted(run: TrainingRun, step: int, position: int, check: Callable[[], None]) -> Done:
        counted_run = dataclasses.replace(run, engine=CountedEngine(run.engine, run.optimizer, notes))
        return train(counted_run, step, position, check)

    Reporter.step = noted
    worker.train = counted
    worker.main()
