"""Process that plans a job's memory, for workers and for `concertina plan`, which has no torch.

Start the process with `python -m concertina_trainer.planning`. The process reads requests from standard input and
writes an answer to each request to standard output, both as JSON, one per line (see `answered`).

- `concertina plan` asks for the memory of layouts. The code of a custom model runs only in this process.
- A worker asks for settings that fit into its device's memory. Planning needs a fake process group, which can't exist
  in the worker beside the worker's real process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import warnings
from typing import Any

from concertina_data.data_manifest import Field
from concertina_state.errors import InvalidInput
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.planning.choice import Job, chosen
from concertina_trainer.planning.described_model import DataDescription, data_of, described
from concertina_trainer.planning.memory import RankMemory, fullest, memory

INVALID_INPUT = 2


def answered(request: dict[str, Any]) -> object:
    """Return the answer to a request. A request has one of these forms:

    - {trainer, data}: returns the description of a custom model. `data`, if known, is {vocab_size, fields}, as in the
      answer.
    - {trainer, data, parallelism, size}: returns the memory of the fullest ranks in this layout with `size` ranks.
    - {trainer, data, parallelism, size, deviceBytes}: returns the settings with which the job fits into a device memory
      of `deviceBytes` bytes.

    Raises:
        InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`), or
            when the model or its data can't be used.
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
    return DataDescription(fields["vocab_size"], tuple(Field(**field) for field in fields["fields"]))


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
