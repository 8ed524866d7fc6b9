"""Data of one letter with a few samples of noise, which make the loss jump after it has fallen."""

from __future__ import annotations

import random
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from concertina_data.data_manifest import VALIDATION
from concertina_protocol import RestoreSource, Undone, log_lines
from concertina_protocol.log_lines import RoundStarted
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.data.read.skips import positions

STEPS, BATCH, LENGTH = 110, 4, 32
BACK, EVERY = 12, 10
Object = dict[str, Any]


class Strange(NamedTuple):
    trainer: dict[str, Any]
    """Return the configuration for STEPS steps of BATCH samples of LENGTH tokens."""
    step: int
    """Step that consumes all of the noise. Before it, there are enough losses to compare with."""


def strange(folder: Path) -> Strange:
    """Build the data in that folder, with a seed for which the noise comes late, and all of it in one step."""
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
        "optimizer": {"learningRate": 0.01, "warmupSteps": 4},
    }  # fmt: skip
    return Strange(trainer, found[0] // BATCH)


def noisy(reader: Reader) -> list[int]:
    """Return those of the samples that a run consumes that contain noise."""
    return [i for i, row in enumerate(reader.read(0, BATCH * STEPS)) if len(set(row.tolist())) > 1]


def rolling_back(bad: Strange, checkpoint: Object) -> Object:
    """Return `trainer` and `checkpoint` of a job that rolls back when its loss jumps.

    The job evaluates on those very samples after each step. That takes a while and changes nothing, so that checkpoints
    are in storage by the time that the noise comes.
    """
    data = Path(bad.trainer["data"]["uri"])
    shards = [path for path in data.iterdir() if path.is_file()]
    (data / VALIDATION).mkdir()
    for path in shards:
        shutil.copy(path, data / VALIDATION)
    anomalies = {"spike": "RollBack", "spikeDeviations": 2, "rollbackSteps": BACK}
    trainer = {**bad.trainer, "anomalies": anomalies, "evaluation": {"everySteps": 1, "sequences": 32}}
    return {"trainer": trainer, "checkpoint": {**checkpoint, "everySteps": EVERY, "keep": 1}}


def check_went_back(bad: Strange, status: Object, log: str, event: Callable[[str], str]) -> None:
    """Check that such a job has undone the states that led to the jump, skipped the samples, said so and completed.

    `log` is the coordinator's, and `event` the message of the first event with that reason.
    """
    back, step = status["rollback"], bad.step
    assert (back["round"], back["step"], back["reason"]) == (1, step - BACK, "LossSpike")
    [(begin, end)] = positions((step - BACK) * BATCH, (step + 1) * BATCH, ())
    assert status["skipped"] == [{"begin": begin, "end": end}]
    assert status["world"]["round"] == 2
    [entry] = status["restarts"]["recent"]
    assert (entry["reason"], entry.get("counted", True)) == ("LossSpike", True)
    assert f"back to step {step - BACK} or before" in event("RolledBack")
    assert f"samples {begin} to {end - 1}" in event("SamplesSkipped")
    assert f"samples {begin} to {end - 1} left out" in log
    starts = [line for line in map(log_lines.parse, log.splitlines()) if isinstance(line, RoundStarted)]
    [restored] = [start.restored_step for start in starts if (start.round, start.source) == (2, RestoreSource.STORAGE)]
    assert restored <= step - BACK
    evaluated = [int(found) for found in re.findall(r"step (\d+): evaluation loss", log)]
    assert evaluated == [*range(1, step + 1), *range(max(1, restored), STEPS + 1)]
    assert status["progress"]["evaluation"]["step"] == STEPS

    last = StoredCheckpoint(status["lastCheckpoint"]["uri"]).manifest
    assert (last.id.step, last.position, last.complete) == (STEPS, STEPS * BATCH, True)
    assert (last.skipped, last.undone) == (((begin, end),), (Undone(1, step - BACK),))
    consumed = Reader(DataConfig.model_validate(bad.trainer["data"]), LENGTH, bad.trainer["seed"], last.skipped)
    assert noisy(consumed) == [], "none of what led there was trained on"
