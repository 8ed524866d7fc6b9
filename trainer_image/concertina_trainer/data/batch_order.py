"""Order of many positions at once: that of `concertina_data.order`, computed by numpy.

Plain integers take several times as long for blocks of thousands of positions, and seconds for millions of shards. A
test checks that both give the same order (decision "One order, in integers and in arrays").
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from concertina_data import order
from concertina_data.order import ROUNDS, WINDOW, half_bits, key_of, mixed

_TABLE_BITS = 16
_STRETCH = 2**19
"""Shards to permute at once, which bounds the memory for millions of them."""
_Numbers = NDArray[np.uint64]


def permute(values: NDArray[np.generic], size: int, key: int) -> _Numbers:
    """Apply a permutation of 0 ... size-1 to each value; `key` (64 bits) chooses the permutation."""
    half = half_bits(size)
    keys = [np.uint64(mixed(key + i)) for i in range(ROUNDS)]
    network = _by_tables if len(values) >> half and half <= _TABLE_BITS else _by_arithmetic
    result = network(values.astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(result >= size)):  # the network permutes a power of 4 >= size: repeat
        result[outside] = network(result[outside], half, keys)
    return result


def _by_arithmetic(values: _Numbers, half: int, keys: Sequence[np.uint64]) -> _Numbers:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right


def _by_tables(values: _Numbers, half: int, keys: Sequence[np.uint64]) -> _Numbers:
    """Compute the network by tables.

    The result is the same, faster for many values of few bits: a round's function has only 2^half values.
    """
    bits, mask = np.uint32(half), np.uint64(2**half - 1)
    every = np.arange(2**half, dtype=np.uint64)
    left, right = (values >> np.uint64(half)).astype(np.uint32), (values & mask).astype(np.uint32)
    for key in keys:
        table = (mix(every ^ key) & mask).astype(np.uint32)
        left ^= table[right]
        left, right = right, left
    return ((left << bits) | right).astype(np.uint64)


def mix(x: _Numbers) -> _Numbers:
    """Return the finalizer of SplitMix64, as `concertina_data.order.mix` does."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BatchOrder(order.Order):
    """Order of sequences over shards, for many positions at once."""

    def __init__(self, counts: Sequence[int] | NDArray[np.int64], seed: int) -> None:
        self._array = np.asarray(counts, dtype=np.int64)
        super().__init__(self._array.data, seed)

    def _total(self) -> int:
        return int(self._array.sum())

    def _epoch_tables(self, epoch: int) -> tuple[array[int], array[int]]:
        size, key = len(self._array), key_of(self._seed, epoch, 1)
        shards, begins = array("i", bytes(4 * size)), array("q", bytes(8 * (size + 1)))
        permuted = np.frombuffer(shards, np.int32)
        for begin in range(0, size, _STRETCH):
            places = np.arange(begin, min(size, begin + _STRETCH), dtype=np.uint64)
            permuted[begin : begin + _STRETCH] = permute(places, size, key)
        np.cumsum(self._array[permuted], out=np.frombuffer(begins, np.int64)[1:])
        return shards, begins

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each position, and the index of the sequence in the shard."""
        epochs, places = np.divmod(positions, self.epoch_size)
        shards, indexes = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            shards[inside], indexes[inside] = self._within(epoch, places[inside])
        return shards, indexes

    def locate(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the same as `at` for the positions [start, stop), which may cross the end of an epoch."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def _within(self, epoch: int, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        in_order, ends = self._epoch(epoch)
        shards, begins = np.frombuffer(in_order, np.int32), np.frombuffer(ends, np.int64)
        shard_places = np.searchsorted(begins, places, side="right") - 1
        shuffled = np.empty_like(places)
        for window in np.unique(shard_places // WINDOW):
            inside = shard_places // WINDOW == window
            first, last = begins[window * WINDOW], begins[min((window + 1) * WINDOW, len(shards))]
            key = key_of(self._seed, epoch, 2, int(window))
            shuffled[inside] = first + permute((places[inside] - first).astype(np.uint64), int(last - first), key)
        shard_places = np.searchsorted(begins, shuffled, side="right") - 1
        return shards[shard_places].astype(np.int64), shuffled - begins[shard_places]


class Skipped:
    """Sorted ranges [begin, end) of positions that are never consumed, and that do not overlap.

    `position_of` returns the position of the n-th consumed sequence. A range that is added ahead of what was consumed
    does not change this, so the list may grow in the course of a run.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]] = ()) -> None:
        """Prepare the ranges.

        Raises:
            ValueError: When they are not sorted, or overlap.
        """
        begins, ends = (
            np.array(edges, dtype=np.int64) for edges in (zip(*stretches, strict=True) if stretches else ((), ()))
        )
        if (begins >= ends).any() or (begins[1:] < ends[:-1]).any():
            raise ValueError(f"skipped positions must be sorted stretches that don't overlap: {list(stretches)[:9]}")
        self._skipped = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)])
        self._reached = begins - self._skipped[:-1]

    def position_of(self, consumed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the n-th sequence that is consumed, counting from 0."""
        positions: NDArray[np.int64] = consumed + self._skipped[np.searchsorted(self._reached, consumed, side="right")]
        return positions
