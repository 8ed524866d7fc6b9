"""Execution of a read plan: bytes of shard files are read into arrays of any library.

The module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Optional, Protocol

from concertina_state.format.read_plan import ReadItem, ReadPlan
from concertina_state.format.shardfile import Header

THREADS = 4
"""Number of threads that read. One thread does not use the whole memory bandwidth."""


class ShardReader(Protocol):
    """Reader of one shard's file."""

    @property
    def header(self) -> Header: ...

    @property
    def batch_bytes(self) -> int:
        """Number of bytes that a reader should request at a time, for the best throughput."""
        ...

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memoryview with bytes of the file, beginning at the memoryview's offset.

        Several threads may call this method at the same time.
        """
        ...


Place = tuple[memoryview, Optional[Callable[[], None]]]
"""Memory to read bytes into, and a function that copies these bytes into their array, or None.

The function is None if the memory is the array's own memory, so that nothing has to be copied.
"""


def execute(plan: ReadPlan, shards: Mapping[int, ShardReader], place_for: Callable[[ReadItem], Place]) -> None:
    """Read all items of the plan from `shards` into the memory that `place_for` returns for each item.

    Items of a shard are read in batches, several at once in threads. At any time, at most one batch per thread is in
    memory.
    """
    batches = [
        (shards[number], batch) for number in plan.shards for batch in plan.batches(number, shards[number].batch_bytes)
    ]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), "restore") as pool:
        for _ in pool.map(lambda work: _read(work[0], work[1], place_for), batches):
            pass


def _read(shard: ShardReader, batch: Sequence[ReadItem], place_for: Callable[[ReadItem], Place]) -> None:
    places = [place_for(item) for item in batch]
    shard.read_into([(item.begin, memory) for item, (memory, _) in zip(batch, places)])
    for _, take in places:
        if take is not None:
            take()
