"""For `concertina plan`, which has no torch: `python -m concertina_trainer.planning` reads layouts from standard input,
JSON, a line each, and writes what their fullest ranks take to standard output."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from concertina_state.errors import BadInput
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.planning.memory import RankMemory, fullest, memory

BAD_INPUT = 2


def measured(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Of one layout: {trainer, parallelism, size}. Raises BadInput."""
    trainer = TrainerConfig.model_validate(asked["trainer"])
    parallelism = ParallelismConfig.model_validate(asked["parallelism"])
    size = int(asked["size"])
    return [_as_object(memory(trainer, parallelism, size, rank)) for rank in fullest(trainer, parallelism, size)]


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
            print(json.dumps(measured(json.loads(line))), flush=True)
        except BadInput as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
