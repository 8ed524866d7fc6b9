"""Weights as earlier versions stored them, seen as today's. No torch.

They held key and value in one tensor, and gate and up in another, each half of its rows; tensor parallelism cuts each
of the four by itself. A stored tensor is a stretch of rows, so each half is one too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from concertina_state.format.shardfile import Header, StoredChunk

HALVES = {
    ".attention.key_value.weight": (".attention.key.weight", ".attention.value.weight"),
    ".feed_forward.gate_up.weight": (".feed_forward.gate.weight", ".feed_forward.up.weight"),
}


def of_today(header: Header) -> Header:
    chunks = {each.chunk.name: each for stored in header.chunks.values() for each in _halves(stored)}
    return dataclasses.replace(header, chunks=chunks)


def _halves(stored: StoredChunk) -> Iterator[StoredChunk]:
    chunk = stored.chunk
    ending = next((ending for ending in HALVES if chunk.name.endswith(ending)), None)
    if ending is None:
        yield stored
        return
    (whole, *columns), (rows, *width), (first, *left) = chunk.global_shape, chunk.shape, chunk.offsets
    half = whole // 2
    for number, name in enumerate(HALVES[ending]):
        begin, end = max(first, half * number), min(first + rows, half * (number + 1))
        if begin < end:
            part = dataclasses.replace(
                chunk,
                name=chunk.name.removesuffix(ending) + name,
                offsets=(begin - half * number, *left),
                shape=(end - begin, *width),
                global_shape=(half, *columns),
            )
            yield StoredChunk(part, stored.begin + (begin - first) * (chunk.size // rows))
