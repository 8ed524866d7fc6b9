"""The microbatches of each step, prepared ahead of it by a thread."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from concertina_trainer.config.data_config import DocumentMode
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.data.read.buckets import buckets
from concertina_trainer.data.read.sequence_reader import Reader

AHEAD = 2
_STALL_REPORT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Microbatch:
    tokens: Tensor
    """int64 [rows, length + 1]."""
    weights: Tensor
    """float32 [rows, length]: each prediction's weight in the mean over the global batch, 0 for filling; those of all
    ranks and microbatches add up to 1."""
    document_ids: Tensor | None
    """int32 [rows, length]: which document of its row each token is of; None: they are not told apart."""
    samples: tuple[int, ...] = ()
    """Where each row stands in the run's order, but for rows of filling at the end."""
    features: Tensor | None = None
    """[rows, length + 1, width], where the data are frames; `tokens` are their targets then, or 0."""

    def to(self, device: torch.device) -> Microbatch:
        """Without waiting for what is queued on the device, where it is `pinned`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Microbatch:
        """In memory that a GPU reads by itself."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, made: Callable[[Tensor], Tensor]) -> Microbatch:
        ids, features = (each if each is None else made(each) for each in (self.document_ids, self.features))
        return Microbatch(made(self.tokens), made(self.weights), ids, self.samples, features)


class Batches:
    """Step after step from `position` on, this rank's share of each global batch."""

    def __init__(self, reader: Reader, plan: BatchPlan, rank: int, position: int, device: torch.device) -> None:
        self._reader, self._rank, self._device = reader, rank, device
        self.plan = plan
        """Of the round's first batch."""
        self.tokens = 0
        """Of the batch that was taken last, all ranks' (see Reader.tokens)."""
        self._ready: queue.Queue[tuple[list[Microbatch], int] | Exception] = queue.Queue(AHEAD)
        self._taken = 0
        self._change: tuple[int, BatchPlan] | None = None
        self._closed = False
        self.stalled_seconds = 0.0
        threading.Thread(target=self._prepare, args=(position,), name="batches", daemon=True).start()

    def next(self, stalled: Callable[[str, float], None]) -> list[Microbatch]:
        """Waits where reading is slower than training. While that is because of the store, `stalled` is told now and
        then why, and how long this round has waited for data in all. Raises what the reader raised."""
        started, before = time.perf_counter(), self.stalled_seconds
        taken = None
        while taken is None:
            try:
                taken = self._ready.get(timeout=_STALL_REPORT_SECONDS)
            except queue.Empty:
                if reason := self._reader.waiting_for:
                    stalled(reason, before + time.perf_counter() - started)
        self.stalled_seconds = before + time.perf_counter() - started
        if isinstance(taken, Exception):
            raise taken
        batch, self.tokens = taken
        self._taken += 1
        return [microbatch.to(self._device) for microbatch in batch]

    def change(self, plan: BatchPlan) -> None:
        """Another plan for the same positions, from the first batch on that can't have been begun: AHEAD wait, and one
        is at work. So it is the same batch on every rank that has taken as many. Not again before that."""
        self._change = (self._taken + AHEAD + 1, plan)

    def close(self) -> None:
        """End the thread, which keeps the reader's files open otherwise. Call nothing else after it."""
        self._closed = True
        while not self._ready.empty():  # the thread may wait for room, and looks after each batch
            self._ready.get_nowait()

    def _prepare(self, position: int) -> None:
        plan = self.plan
        for index in itertools.count():
            if self._closed:
                return
            change = self._change
            if change is not None and change[0] == index:
                plan = change[1]
            try:
                batch = microbatches(self._reader, plan, self._rank, position)
                tokens = self._reader.tokens(position, position + plan.global_size)
                if self._device.type == "cuda":
                    batch = [each.pinned() for each in batch]
            except Exception as error:  # handed over: raised in the loop's thread
                self._ready.put(error)
                return
            self._ready.put((batch, tokens))
            position += plan.global_size


def microbatches(reader: Reader, plan: BatchPlan, rank: int, position: int, end: int | None = None) -> list[Microbatch]:
    """This rank's share of the global batch that begins at `position`, filled up to the plan's shapes; with `end`,
    without the sequences from there on."""
    reader.expect(position)
    counts = reader.predicted(position, position + plan.global_size)
    taken = plan.global_size if end is None else end - position
    weight = 1.0 / max(1, int(counts[:taken].sum()))
    return [
        _filled(reader, position + offsets[offsets < taken], rows, length, weight)
        for offsets, rows, length in _shapes(reader, counts, plan, rank)
    ]


def _shapes(
    reader: Reader, counts: NDArray[np.int64], plan: BatchPlan, rank: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """For each microbatch: which sequences of the batch, how many rows, of what length."""
    if reader.mode is not DocumentMode.bucketed:
        for cut in plan.slices(rank):
            yield np.arange(cut.start, cut.stop), plan.rows_for(len(cut)), reader.length
        return
    for bucket in buckets(counts, reader.length, plan.rows, plan.world):
        for cut in bucket.plan.slices(rank):
            yield bucket.sequences[cut.start : cut.stop], bucket.plan.rows, bucket.length


def _filled(reader: Reader, sequences: NDArray[np.int64], rows: int, length: int, weight: float) -> Microbatch:
    found = reader.sequences(sequences)
    count, samples = len(sequences), tuple(reader.positions(sequences).tolist())
    tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
    tokens[:count] = torch.from_numpy(found.tokens[:, : length + 1])
    features = None
    if found.features is not None:
        taken = torch.from_numpy(found.features[:, : length + 1])
        features = torch.zeros(rows, *taken.shape[1:], dtype=taken.dtype)
        features[:count] = taken
    weights = torch.zeros(rows, length)
    weights[:count] = weight
    if found.predicted is None or found.document_ids is None:
        return Microbatch(tokens, weights, None, samples, features)
    weights[:count] *= torch.from_numpy(found.predicted[:, :length])
    if reader.mode is DocumentMode.bucketed:
        return Microbatch(tokens, weights, None, samples, features)  # nothing looks ahead at the filling
    document_ids = torch.zeros(rows, length, dtype=torch.int32)
    document_ids[:count] = torch.from_numpy(found.document_ids[:, :length])
    return Microbatch(tokens, weights, document_ids, samples, features)
