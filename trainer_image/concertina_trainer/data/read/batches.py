"""Microbatches of each step. A thread prepares them before the step begins."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from concertina_trainer.config.data_config import DocumentMode
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.data.read.buckets import buckets
from concertina_trainer.data.read.sequence_reader import Reader, SequenceBatch

AHEAD = 32
"""Maximum number of batches that are prepared in advance.

A rank that trains 50 million tokens per second needs a batch each 1.3 ms. If other threads use the cores, the rank has
to wait as soon as it has consumed the prepared batches.
"""
AHEAD_OF_SHARES = 2
"""Maximum number of prepared batches with `data.balance: Speed`.

The number is small, because a change of the shares takes effect only after the prepared batches.
"""
AHEAD_BYTES = 256 * 2**20
"""Maximum total size in bytes of the prepared batches. `_LEAST_AHEAD` batches are prepared even if they are larger."""
_LEAST_AHEAD = 2
_STALL_REPORT_SECONDS = 1.0
_CLOSE_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Rows that a rank computes at the same time."""

    tokens: Tensor
    """Token ids, int64 `[rows, length + 1]`."""
    weights: Tensor
    """Weight of each prediction in the mean over the global batch, float32 `[rows, length]`.

    The weight is 0 for padding, and for tokens of chats that are not trained. The weights of all microbatches of all
    ranks add up to 1, or to 0 if no token of the batch is trained.
    """
    document_ids: Tensor | None
    """Number of each token's document within the token's row, int32 `[rows, length]`, or None.

    The value is None if documents are not distinguished.
    """
    samples: tuple[int, ...] = ()
    """Position in the run's order of each row that is not padding. Padding rows are at the end."""
    fields: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Values of the other fields of the data, `[rows, length + 1]` or `[rows, length + 1, width]`, keyed by field name.

    If the data have no token ids, `tokens` is 0.
    """

    @property
    def bytes(self) -> int:
        """Total size of the tensors in bytes."""
        ids = 0 if self.document_ids is None else self.document_ids.nbytes
        return self.tokens.nbytes + self.weights.nbytes + ids + sum(values.nbytes for values in self.fields.values())

    def to(self, device: torch.device) -> Microbatch:
        """Return the microbatch on a device.

        If the microbatch is pinned, this method does not wait for work that is queued on the device.
        """
        return self._converted(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Microbatch:
        """Return the microbatch in pinned memory, from which a GPU can copy while the host continues."""
        return self._converted(lambda tensor: tensor.pin_memory())

    def _converted(self, convert: Callable[[Tensor], Tensor]) -> Microbatch:
        ids = None if self.document_ids is None else convert(self.document_ids)
        fields = {name: convert(values) for name, values in self.fields.items()}
        return Microbatch(convert(self.tokens), convert(self.weights), ids, self.samples, fields)


class Batches:
    """Iterator over the parts of the global batches that one rank computes, from the sample `position` on."""

    def __init__(
        self, reader: Reader, plan: BatchPlan, rank: int, position: int, device: torch.device, ahead: int = AHEAD
    ) -> None:
        self._reader, self._rank, self._device = reader, rank, device
        self.plan = plan
        """Plan of the first batch of the round."""
        self.tokens = 0
        """Number of tokens in the last batch of all ranks (see `Reader.tokens`)."""
        self._ready: queue.Queue[tuple[list[Microbatch], int] | Exception] = queue.Queue(ahead)
        self._most_ahead = ahead
        self._room = threading.Condition()
        self._ready_bytes = 0
        self._consumed = 0
        self._change: tuple[int, BatchPlan] | None = None
        self._closed = False
        self.stalled_seconds = 0.0
        self._thread = threading.Thread(target=self._prepare, args=(position,), name="batches", daemon=True)
        self._thread.start()

    def next(self, stalled: Callable[[str, float], None]) -> list[Microbatch]:
        """Return the next batch. If reading is slower than training, wait for the batch.

        Only time in which no batch is ready counts as a wait, in `stalled_seconds`. While a store causes the wait, this
        method calls `stalled` repeatedly, with the reason and the total seconds that this round has waited for data. If
        the reader fails, this method raises the reader's error.
        """
        try:
            prepared = self._ready.get_nowait()
        except queue.Empty:
            prepared = self._wait(stalled)
        if isinstance(prepared, Exception):
            raise prepared
        batch, self.tokens = prepared
        with self._room:
            self._ready_bytes -= _bytes(batch)
            self._room.notify()
        self._consumed += 1
        return [microbatch.to(self._device) for microbatch in batch]

    def _wait(self, stalled: Callable[[str, float], None]) -> tuple[list[Microbatch], int] | Exception:
        """Wait for the next item that the thread prepares. The time of the wait is added to `stalled_seconds`."""
        started, before = time.perf_counter(), self.stalled_seconds
        prepared = None
        while prepared is None:
            try:
                prepared = self._ready.get(timeout=_STALL_REPORT_SECONDS)
            except queue.Empty:
                if reason := self._reader.waiting_for:
                    stalled(reason, before + time.perf_counter() - started)
        self.stalled_seconds = before + time.perf_counter() - started
        return prepared

    def change(self, plan: BatchPlan) -> None:
        """Divide the batches by the plan `plan`, from the first batch on that is certainly not in preparation yet.

        The thread prepares at most `ahead` batches in advance, and one more can be in progress. The change therefore
        takes effect `ahead` + 1 batches later, at the same batch on all ranks that have consumed the same number of
        batches. Do not call this method again before that batch.
        """
        self._change = (self._consumed + self._most_ahead + 1, plan)

    def close(self) -> None:
        """End the thread, which otherwise keeps the reader's files open. No other method may be called afterwards."""
        with self._room:
            self._closed = True
            self._room.notify()
        while self._thread.is_alive():  # it may wait for space in the queue; it checks `_closed` after each batch
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=_CLOSE_SECONDS)

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
                    batch = [microbatch.pinned() for microbatch in batch]
            except Exception as error:  # `next` raises it in the training thread
                self._ready.put(error)
                return
            self._wait_for_room(_bytes(batch))
            self._ready.put((batch, tokens))
            position += plan.global_size

    def _wait_for_room(self, size: int) -> None:
        with self._room:
            self._room.wait_for(
                lambda: self._closed or self._ready.qsize() < _LEAST_AHEAD or self._ready_bytes + size <= AHEAD_BYTES
            )
            self._ready_bytes += size


def _bytes(batch: list[Microbatch]) -> int:
    return sum(microbatch.bytes for microbatch in batch)


def microbatches(reader: Reader, plan: BatchPlan, rank: int, position: int, end: int | None = None) -> list[Microbatch]:
    """Return a rank's microbatches of the global batch that begins at `position`, padded to the shapes of the plan.

    If `end` is set, sequences with the number `end` or a higher one are left out.
    """
    batch, end = reader.batch(position, plan.global_size), position + plan.global_size if end is None else end
    reader.expect_plans(position)
    shapes = list(_shapes(reader, batch, plan, rank))
    reader.expect(position, np.concatenate([numbers for numbers, _, _ in shapes]))
    weight = 1.0 / max(1, int(reader.weight_sums(position, end).sum()))
    own = [numbers[numbers < end] for numbers, _, _ in shapes]
    samples = [tuple(reader.positions(numbers).tolist()) for numbers in own]
    batches = [reader.sequences(numbers, rows) for numbers, (_, rows, _) in zip(own, shapes, strict=True)]
    return [
        _filled(reader.mode, batch, positions, length, weight)
        for batch, positions, (_, _, length) in zip(reader.transformed(batches, samples), samples, shapes, strict=True)
    ]


def _shapes(
    reader: Reader, batch: NDArray[np.int64], plan: BatchPlan, rank: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Yield, for each microbatch, the numbers of its sequences, the number of its rows, and the length of a row.

    Each sequence of the run has a number. `batch` contains the numbers of all sequences of the global batch, in the
    order in which ranks divide them.
    """
    if reader.mode is not DocumentMode.bucketed:
        for cut in plan.slices(rank):
            yield batch[cut.start : cut.stop], plan.rows_for(len(cut)), reader.length
        return
    start, stop = int(batch.min()), int(batch.max()) + 1
    lengths = reader.predicted(start, stop)[batch - start]
    for bucket in buckets(lengths, reader.length, plan.rows, plan.world):
        for cut in bucket.plan.slices(rank):
            yield batch[bucket.sequences[cut.start : cut.stop]], bucket.plan.rows, bucket.length


def _filled(
    mode: DocumentMode, batch: SequenceBatch, samples: tuple[int, ...], length: int, weight: float
) -> Microbatch:
    tokens = _cut(batch.tokens, length + 1)
    fields = {name: _cut(values, length + 1) for name, values in batch.fields.items()}
    weights = torch.full((len(batch.tokens), length), weight)
    weights[len(samples) :] = 0.0
    if batch.predicted is None or batch.document_ids is None:
        return Microbatch(tokens, weights, None, samples, fields)
    of_tokens = batch.predicted if batch.weights is None else batch.weights
    weights *= torch.from_numpy(of_tokens[:, :length])
    if mode is DocumentMode.bucketed:
        return Microbatch(tokens, weights, None, samples, fields)  # padding comes last, so no token attends to it
    return Microbatch(tokens, weights, _cut(batch.document_ids, length), samples, fields)


def _cut(rows: NDArray[Any], length: int) -> Tensor:
    """Return the first `length` elements of each row. Whole rows are not copied."""
    return torch.from_numpy(rows[:, :length]).contiguous()
