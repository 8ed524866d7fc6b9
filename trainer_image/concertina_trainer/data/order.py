"""Which sequence stands at which position: a pure function of the manifest's counts, the seed and the position.

An epoch visits every sequence once. Its shards are permuted and taken in windows of WINDOW shards; within a window all
sequences are permuted together, so a reader needs WINDOW shards at hand and no more (decision "Data order in two
levels"). Both permutations are keyed Feistel networks with cycle walking: any position is computed by itself, without
state and without a table of sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 16
_TABLE_BITS = 16
_STRETCH = 2**19
"""Shards that are permuted at once: what bounds the memory for millions of them."""
_ROUNDS = 6
_Numbers = NDArray[np.uint64]


def permute(values: NDArray[np.generic], size: int, key: int) -> _Numbers:
    """A permutation of 0 ... size-1, applied to each value; `key` (64 bits) chooses it."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(_mixed(key + i)) for i in range(_ROUNDS)]
    network = _by_tables if len(values) >> half and half <= _TABLE_BITS else _by_arithmetic
    result = network(values.astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(result >= size)):  # it permutes a power of 4 >= size: walk on until within
        result[outside] = network(result[outside], half, keys)
    return result


def _by_arithmetic(values: _Numbers, half: int, keys: Sequence[np.uint64]) -> _Numbers:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right


def _by_tables(values: _Numbers, half: int, keys: Sequence[np.uint64]) -> _Numbers:
    """The same for many values of few bits: a round's function has only 2^half of them."""
    bits, mask = np.uint32(half), np.uint64(2**half - 1)
    every = np.arange(2**half, dtype=np.uint64)
    left, right = (values >> np.uint64(half)).astype(np.uint32), (values & mask).astype(np.uint32)
    for key in keys:
        table = (mix(every ^ key) & mask).astype(np.uint32)
        left ^= table[right]
        left, right = right, left
    return ((left << bits) | right).astype(np.uint64)


def mix(x: _Numbers) -> _Numbers:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed(x: int) -> int:
    """One step of SplitMix64."""
    return int(mix(np.array([(x + 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64))[0])


def _key(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = _mixed(key ^ number)
    return key


class Order:
    """The order of sequences over shards that hold `counts` of them each."""

    def __init__(self, counts: Sequence[int] | NDArray[np.int64], seed: int) -> None:
        self._counts = np.asarray(counts, dtype=np.int64)
        self._seed = seed
        self.epoch_size = int(self._counts.sum())
        if not self.epoch_size:
            raise ValueError("there is no whole sequence in any shard")
        self._epoch = functools.lru_cache(maxsize=2)(self._epoch_tables)

    def _epoch_tables(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Shards in this epoch's order, and where each begins in it (counted in sequences)."""
        size, key = len(self._counts), _key(self._seed, epoch, 1)
        shards = np.empty(size, dtype=np.int32)
        for begin in range(0, size, _STRETCH):
            places = np.arange(begin, min(size, begin + _STRETCH), dtype=np.uint64)
            shards[begin : begin + _STRETCH] = permute(places, size, key)
        begins = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(self._counts[shards], out=begins[1:])
        return shards, begins

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard of each position, and which of its sequences, from 0 on."""
        epochs, places = np.divmod(positions, self.epoch_size)
        shards, indexes = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            shards[inside], indexes[inside] = self._within(epoch, places[inside])
        return shards, indexes

    def locate(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `at`, for the positions [start, stop), which may run over the end of an epoch."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def nearby(self, position: int) -> list[int]:
        """The shards of this position's window, and then those of the next one."""
        epoch, place = divmod(position, self.epoch_size)
        shards, begins = self._epoch(epoch)
        first = (int(np.searchsorted(begins, place, side="right")) - 1) // WINDOW * WINDOW
        found = shards[first : first + 2 * WINDOW]
        if first + WINDOW >= len(shards):
            found = np.concatenate([found, self._epoch(epoch + 1)[0][:WINDOW]])
        return [int(shard) for shard in dict.fromkeys(found.tolist()) if self._counts[shard]]

    def _within(self, epoch: int, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shards, begins = self._epoch(epoch)
        shard_places = np.searchsorted(begins, places, side="right") - 1
        shuffled = np.empty_like(places)
        for window in np.unique(shard_places // WINDOW):
            inside = shard_places // WINDOW == window
            first, last = begins[window * WINDOW], begins[min((window + 1) * WINDOW, len(shards))]
            key = _key(self._seed, epoch, 2, int(window))
            shuffled[inside] = first + permute((places[inside] - first).astype(np.uint64), int(last - first), key)
        shard_places = np.searchsorted(begins, shuffled, side="right") - 1
        return shards[shard_places].astype(np.int64), shuffled - begins[shard_places]


class Skipped:
    """Stretches [begin, end) of positions that are never consumed, sorted, and apart from each other.

    Who counts consumed sequences asks `position_of` which position the n-th of them has. A stretch added ahead of what
    was consumed changes nothing of that, so the list may grow in the course of a run."""

    def __init__(self, stretches: Sequence[tuple[int, int]] = ()) -> None:
        begins, ends = (
            np.array(edges, dtype=np.int64) for edges in (zip(*stretches, strict=True) if stretches else ((), ()))
        )
        if (begins >= ends).any() or (begins[1:] < ends[:-1]).any():
            raise ValueError(f"skipped positions must be sorted stretches that don't overlap: {list(stretches)[:9]}")
        self._skipped = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)])
        self._reached = begins - self._skipped[:-1]

    def position_of(self, consumed: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position of the n-th sequence that is consumed, counting from 0."""
        positions: NDArray[np.int64] = consumed + self._skipped[np.searchsorted(self._reached, consumed, side="right")]
        return positions
