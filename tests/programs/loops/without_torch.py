"""Scripts that do not import torch."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy

import trainingjob
from loops.run import BATCH, Run

FEATURES = 7


def train(run: Run) -> None:
    """Train weights that all ranks hold, with momentum of which each rank has some rows."""
    numpy.random.seed(run.rank)
    random.seed(run.rank)
    gather = Gather(run)
    mine = run.share(FEATURES)
    weights, momentum = numpy.zeros(FEATURES), numpy.zeros(len(mine))
    part = trainingjob.ArrayShard(momentum, [mine.start], [FEATURES])
    kept: dict[str, Any] = {"weights": weights, "momentum": part, "seen": 0}
    state = trainingjob.State(kept=kept, gather=gather if run.size > 1 else None, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        rows = run.share()
        x = numpy.random.default_rng(step).standard_normal((BATCH, FEATURES))[rows.start : rows.stop]
        error = x @ weights - x.sum(1)
        gradients = gather((error @ x / BATCH).tobytes())
        gradient = sum(numpy.frombuffer(each) for each in gradients)
        momentum *= 0.9
        momentum += gradient[mine.start : mine.stop]
        weights -= 0.1 * numpy.concatenate([numpy.frombuffer(each) for each in gather(momentum.tobytes())])
        kept["seen"] += BATCH
        run.record(step, norm=float(numpy.linalg.norm(weights)), seen=kept["seen"])
        run.record_own(step, drawn=(random.random(), numpy.random.rand()))
        run.consumed(step, [step * BATCH + row for row in rows])
        state.commit(step, durable=step == run.steps - 1)


class Gather:
    """All-gather by files."""

    def __init__(self, run: Run) -> None:
        self.run, self.count = run, 0
        self.folder = Path("gathered")
        self.folder.mkdir(exist_ok=True)

    def __call__(self, data: bytes) -> list[bytes]:
        self.count += 1
        new = self.folder / f"new-{self.run.rank}"
        new.write_bytes(data)
        os.replace(new, self.folder / f"{self.count}-{self.run.rank}")
        return [self._of(rank) for rank in range(self.run.size)]

    def _of(self, rank: int) -> bytes:
        path = self.folder / f"{self.count}-{rank}"
        while not path.exists():
            time.sleep(0.001)
        return path.read_bytes()
