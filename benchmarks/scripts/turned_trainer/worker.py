"""Worker of the bundled trainer that trains in turns with the other processes of `benchmarks/trainer.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from concertina_protocol.worker_channel import Done
from concertina_trainer import worker
from concertina_trainer.training.loop import TrainingRun
from concertina_trainer.training.progress_report import Reporter, StepInfo

sys.path.append(str(Path(__file__).parents[1]))
from in_turn import Turn


def main() -> None:
    turn, weights = Turn(), 0
    step, train, run = Reporter.step, worker.train, worker.run

    def built_in_turn(*arguments: object) -> Done:
        turn.build()
        return run(*arguments)  # type: ignore[arg-type]

    def counted(training: TrainingRun, number: int, position: int, check: Callable[[], None]) -> Done:
        nonlocal weights
        weights = sum(parameter.numel() for parameter in training.optimizer._sharded.values())
        return train(training, number, position, check)

    def in_turn(self: Reporter, info: StepInfo) -> None:
        step(self, info)
        turn.step(info.loss, weights)

    worker.run, worker.train, Reporter.step = built_in_turn, counted, in_turn
    worker.main()
