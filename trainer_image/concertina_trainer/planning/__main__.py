"""For `concertina plan`, which has no torch: `python -m concertina_trainer.planning` reads layouts from standard input,
JSON, a line each, and writes what their fullest ranks take to standard output. Of a model of one's own it is asked
first what that is; its code runs in this process alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import warnings
from typing import Any

from concertina_data.data_manifest import FrameFacts
from concertina_state.errors import InvalidInput
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.planning.described_model import DataDescription, data_of, described
from concertina_trainer.planning.memory import RankMemory, fullest, memory

INVALID_INPUT = 2


def answered(asked: dict[str, Any]) -> object:
    """{trainer, data}: of a model of one's own, what it is. `data`, if they are known: {vocab_size, frames}, as the
    answer tells them. Or {trainer, data, parallelism, size}: of one layout. Raises InvalidInput."""
    trainer = TrainerConfig.model_validate(asked["trainer"])
    data = _data(asked.get("data"))
    if "size" not in asked:
        data = data or data_of(trainer)
        return {**dataclasses.asdict(described(trainer, data)), "data": dataclasses.asdict(data)}
    parallelism = ParallelismConfig.model_validate(asked["parallelism"])
    size = int(asked["size"])
    ranks = fullest(trainer, parallelism, size)
    return [_as_object(memory(trainer, parallelism, size, rank, data)) for rank in ranks]


def _data(found: dict[str, Any] | None) -> DataDescription | None:
    if found is None:
        return None
    frames = found.get("frames")
    return DataDescription(found["vocab_size"], FrameFacts(**frames) if frames else None)


def _as_object(found: RankMemory) -> dict[str, Any]:
    peaks = {
        phase.value: {kind.value: round(size) for kind, size in kinds.items()} for phase, kinds in found.peaks.items()
    }
    sent = {name: round(size) for name, size in found.sent.items()}
    host = {kind.value: round(size) for kind, size in found.host.items()}
    return {"rank": found.rank, "peaks": peaks, "sent": sent, "host": host}


def main() -> int:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what a model of one's own prints
                found = answered(json.loads(line))
        except InvalidInput as error:
            print(*str(error).split(), file=sys.stderr)  # the last line says what is wrong
            return INVALID_INPUT
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
