"""Which sequence stands at which position: a pure function of the manifest's counts, the seed and the position.

An epoch visits every sequence once. Its shards are permuted and taken in windows of WINDOW shards; within a window all
sequences are permuted together, so a reader needs WINDOW shards at hand and no more. Both permutations are keyed
Feistel networks with cycle walking: any position is computed by itself, without state and without a table of sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 16
_ROUNDS = 6
_Numbers = NDArray[np.uint64]


def permute(values: _Numbers, size: int, key: int) -> _Numbers:
    """A permutation of 0 ... size-1, applied to each value; `key` (64 bits) chooses it."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = [np.uint64(_mixed(key + i)) for i in range(_ROUNDS)]
    result = _feistel(values.astype(np.uint64), half, keys)
    while (outside := result >= size).any():  # the network permutes a power of 4 >= size: walk on until within
        result[outside] = _feistel(result[outside], half, keys)
    return result


def _feistel(values: _Numbers, half: np.uint64, keys: Sequence[np.uint64]) -> _Numbers:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right


def mix(x: _Numbers) -> _Numbers:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed(x: int) -> int:
    """One step of SplitMix64."""
    return int(mix(np.array([(x + 0x9E3779B97F4A7C15) % 2**64], dtype=np.uint64))[0])


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mixed(key ^ part)
    return key


class Order:
    """The order of sequences over shards that hold `counts` of them each."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        self._counts = np.array(counts, dtype=np.int64)
        self._seed = seed
        self.epoch_size = int(self._counts.sum())
        if not self.epoch_size:
            raise ValueError("there is no whole sequence in any shard")
        self._epoch = functools.lru_cache(maxsize=2)(self._epoch_tables)

    def _epoch_tables(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shards in this epoch's order, and where each begins in it (counted in sequences)."""
        places = np.arange(len(self._counts), dtype=np.uint64)
        shards = permute(places, len(self._counts), _key(self._seed, epoch, 1)).astype(np.int64)
        return shards, np.concatenate([[0], np.cumsum(self._counts[shards])])

    def locate(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard and row of each of the positions [start, stop), which may run over the end of an epoch."""
        shards, rows = [], []
        while start < stop:
            epoch, first = divmod(start, self.epoch_size)
            last = min(self.epoch_size, first + stop - start)
            shard, row = self._within(epoch, np.arange(first, last, dtype=np.int64))
            shards.append(shard)
            rows.append(row)
            start += last - first
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *shards]), np.concatenate([empty, *rows])

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
        return shards[shard_places], shuffled - begins[shard_places]
