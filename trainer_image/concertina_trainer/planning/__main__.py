"""Planning process for `concertina plan`, which has no torch, and for workers: `python -m concertina_trainer.planning`.

It reads layouts from standard input, as JSON, one per line, and writes what their fullest ranks use to standard output.
For a custom model, the first request asks for its description. `concertina plan` runs the model's code only in this
process. Workers ask for the settings that fit, because a process that is in a process group can't plan.
"""

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
from concertina_trainer.planning.choice import Job, chosen
from concertina_trainer.planning.described_model import DataDescription, data_of, described
from concertina_trainer.planning.memory import RankMemory, fullest, memory

INVALID_INPUT = 2


def answered(request: dict[str, Any]) -> object:
    """Answer a request.

    {trainer, data} asks for the description of a custom model. `data`, if known, is {vocab_size, frames}, as in
    the answer. {trainer, data, parallelism, size} asks for one layout. With `deviceBytes`, it asks for the settings
    that fit into so much memory.

    Raises:
        InvalidInput: When the world is no whole number of blocks, or the model or its data can't be used.
    """
    trainer = TrainerConfig.model_validate(request["trainer"])
    data = _data(request.get("data"))
    if "size" not in request:
        data = data or data_of(trainer)
        return {**dataclasses.asdict(described(trainer, data)), "data": dataclasses.asdict(data)}
    parallelism = ParallelismConfig.model_validate(request["parallelism"])
    size = int(request["size"])
    if "deviceBytes" in request:
        return dataclasses.asdict(chosen(Job(trainer, parallelism, size, data), int(request["deviceBytes"])))
    ranks = fullest(trainer, parallelism, size)
    return [_as_object(memory(trainer, parallelism, size, rank, data)) for rank in ranks]


def _data(fields: dict[str, Any] | None) -> DataDescription | None:
    if fields is None:
        return None
    frames = fields.get("frames")
    return DataDescription(fields["vocab_size"], FrameFacts(**frames) if frames else None)


def _as_object(rank_memory: RankMemory) -> dict[str, Any]:
    peaks = {
        phase.value: {kind.value: round(size) for kind, size in kinds.items()}
        for phase, kinds in rank_memory.peaks.items()
    }
    sent = {name: round(size) for name, size in rank_memory.sent.items()}
    host = {kind.value: round(size) for kind, size in rank_memory.host.items()}
    return {"rank": rank_memory.rank, "peaks": peaks, "sent": sent, "host": host}


def main() -> int:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # for output of a custom model
                answer = answered(json.loads(line))
        except InvalidInput as error:
            print(*str(error).split(), file=sys.stderr)  # the last line of stderr is the error
            return INVALID_INPUT
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
