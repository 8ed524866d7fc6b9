"""Data of one letter with a few samples of noise: a loss that has come down jumps where they are consumed."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any, NamedTuple

from concertina_trainer.config import DataConfig
from concertina_trainer.data.build import build
from concertina_trainer.data.reader import Reader

STEPS, BATCH, LENGTH = 110, 4, 32


class Strange(NamedTuple):
    trainer: dict[str, Any]
    """Configuration, for STEPS steps of BATCH samples of LENGTH tokens."""
    step: int
    """The one that consumes all of the noise; there are enough losses before it to compare with."""


def strange(folder: Path) -> Strange:
    """Built in that folder. A seed is looked for that brings the noise late, and all of it in one step."""
    noise = "".join(random.Random(1).choices(string.printable[:90], k=LENGTH - 8))
    half = "a" * (LENGTH * BATCH * STEPS // 2)
    (folder / "text").write_text(half + "aaaa" + noise + half)
    list(build([folder / "text"], str(folder / "data")))
    for seed in range(1000):
        reader = Reader(DataConfig(uri=str(folder / "data")), LENGTH, seed)
        found = noisy(reader)
        if found and all(75 <= i // BATCH < 85 for i in found) and len({i // BATCH for i in found}) == 1:
            break
    trainer = {
        "steps": STEPS, "seed": seed, "data": {"uri": str(folder / "data")},
        "globalBatchSize": BATCH, "microBatchSize": 2,
        "model": {"layers": 1, "dim": 32, "heads": 2, "sequenceLength": LENGTH},
        "optimizer": {"learningRate": 0.01, "warmupSteps": 4}, "logEverySteps": 100,
    }  # fmt: skip
    return Strange(trainer, found[0] // BATCH)


def noisy(reader: Reader) -> list[int]:
    """Of the samples that a run consumes, those with noise."""
    return [i for i, row in enumerate(reader.read(0, BATCH * STEPS)) if len(set(row.tolist())) > 1]
