"""The microbatches of each step, prepared ahead of it by a thread."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import torch
from torch import Tensor

from concertina_trainer.batch import BatchPlan
from concertina_trainer.data.reader import Reader

AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Microbatch:
    tokens: Tensor
    """int64 [rows, sequence_length + 1]."""
    weights: Tensor
    """float32 [rows]: 1, and 0 for filling."""


class Batches:
    """Step after step from `position` on, this rank's slice of each global batch."""

    def __init__(self, reader: Reader, plan: BatchPlan, rank: int, position: int, device: torch.device) -> None:
        self._reader, self._plan, self._rank, self._device = reader, plan, rank, device
        self._ready: queue.Queue[list[Microbatch] | Exception] = queue.Queue(AHEAD)
        self.stalled_seconds = 0.0
        threading.Thread(target=self._prepare, args=(position,), name="batches", daemon=True).start()

    def next(self) -> list[Microbatch]:
        """Waits where reading is slower than training. Raises what the reader raised."""
        started = time.perf_counter()
        batch = self._ready.get()
        self.stalled_seconds += time.perf_counter() - started
        if isinstance(batch, Exception):
            raise batch
        return [Microbatch(m.tokens.to(self._device), m.weights.to(self._device)) for m in batch]

    def _prepare(self, position: int) -> None:
        while True:
            try:
                batch = microbatches(self._reader, self._plan, self._rank, position)
            except Exception as error:  # handed over: raised in the loop's thread
                self._ready.put(error)
                return
            self._ready.put(batch)
            position += self._plan.global_size


def microbatches(reader: Reader, plan: BatchPlan, rank: int, position: int) -> list[Microbatch]:
    """This rank's part of the global batch that begins at `position`, filled up to equal shapes."""
    return [_filled(reader, position, part, plan.rows) for part in plan.parts(rank)]


def _filled(reader: Reader, position: int, part: range, rows: int) -> Microbatch:
    found = torch.from_numpy(reader.read(position + part.start, position + part.stop))
    tokens = torch.zeros(rows, found.size(1), dtype=torch.int64)
    tokens[: len(part)] = found
    weights = torch.zeros(rows)
    weights[: len(part)] = 1.0
    return Microbatch(tokens, weights)
