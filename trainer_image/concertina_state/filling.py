"""A plan of byte ranges, carried out: what it reads goes into live arrays, of whatever library. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from concertina_state.format.read_plan import ReadItem, ReadPlan
from concertina_state.format.shardfile import Header

THREADS = 4
"""That read: one alone does not fill a memory bus."""


class ShardReader(Protocol):
    """Something that holds one shard's file."""

    @property
    def header(self) -> Header: ...

    @property
    def batch_bytes(self) -> int:
        """So many are best asked for at once."""
        ...

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each with the file's bytes from that offset on. From several threads at a time."""
        ...


Place = tuple[memoryview, Callable[[], None] | None]
"""Memory for what an item reads, and what takes it to where it belongs; None where that is the memory itself."""


def execute(plan: ReadPlan, shards: Mapping[int, ShardReader], place: Callable[[ReadItem], Place]) -> None:
    """Read what was planned. What is held meanwhile is a batch for each thread."""
    batches = [
        (shards[number], batch) for number in plan.shards for batch in plan.batches(number, shards[number].batch_bytes)
    ]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), "restore") as pool:
        for _ in pool.map(lambda each: _read(each[0], each[1], place), batches):
            pass


def _read(shard: ShardReader, batch: Sequence[ReadItem], place: Callable[[ReadItem], Place]) -> None:
    places = [place(item) for item in batch]
    shard.read_into([(item.begin, memory) for item, (memory, _) in zip(batch, places, strict=True)])
    for _, take in places:
        if take is not None:
            take()
