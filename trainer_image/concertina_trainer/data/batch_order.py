"""Order of the sequences of a data set, computed by numpy for many positions at once.

The order is the same as in `concertina_data.order`, which computes one position at a time with plain integers. For
blocks of thousands of positions, plain integers would take several times as long. For a data set with millions of
shards, plain integers would take seconds. A test checks that both modules give the same order (decision "Two
implementations of one data order").
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from concertina_data import order
from concertina_data.order import ROUNDS, half_bits, key_of, mixed

_TABLE_BITS = 16
_STRETCH = 2**19
"""Number of shards to permute at once. The number limits memory use if there are millions of shards."""
_Numbers = NDArray[np.uint64]


def permute(values: NDArray[np.generic], size: int, key: int) -> _Numbers:
    """Apply a permutation of 0 ... size-1 to each value. The 64-bit `key` selects the permutation."""
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
    """Apply a permutation to values, by tables of the round function of the permutation's Feistel network.

    The result is the same as that of `_by_arithmetic`. Tables are faster if there are many values with few bits,
    because the round function then has only 2^half different results.
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
    """Mix the bits of each element of `x` by the finalizer of SplitMix64, as `concertina_data.order.mix` does."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute_each(values: _Numbers, sizes: NDArray[np.int64], keys: Sequence[int], which: NDArray[np.intp]) -> _Numbers:
    """Apply permutation number `which` to each value, for many values and several permutations at once.

    Permutation number i is that of 0 ... sizes[i]-1 with the key keys[i], as `permute` computes it.
    """
    halves = np.array([half_bits(size) for size in sizes.tolist()], dtype=np.uint64)
    rounds = np.array([[mixed(key + i) for key in keys] for i in range(ROUNDS)], dtype=np.uint64)
    bits, bounds, in_turn = halves[which], sizes.astype(np.uint64)[which], rounds[:, which]
    mask = (np.uint64(1) << bits) - np.uint64(1)

    def network(values: _Numbers, some: slice | NDArray[np.intp]) -> _Numbers:
        left, right = values >> bits[some], values & mask[some]
        for key in in_turn:
            left, right = right, left ^ (mix(right ^ key[some]) & mask[some])
        return (left << bits[some]) | right

    result = network(values, slice(None))
    while len(outside := np.flatnonzero(result >= bounds)):  # the network permutes a power of 4 >= size: repeat
        result[outside] = network(result[outside], outside)
    return result


class BatchOrder(order.Order):
    """Order of the sequences of a data set, for many positions at once."""

    def __init__(
        self, counts: Sequence[int] | NDArray[np.int64], seed: int, turns: Sequence[int] | NDArray[np.int64] = (0,)
    ) -> None:
        self._array = np.asarray(counts, dtype=np.int64)
        self._turn_groups = np.asarray(turns, dtype=np.int64)
        super().__init__(self._array.data, seed, self._turn_groups.tolist())
        self._earlier_turns = np.array(self._earlier, dtype=np.int64)

    def _total(self) -> int:
        return int(self._array.sum())

    def _in_order(self, epoch: int) -> tuple[array[int], array[int]]:
        size, key = len(self._array), key_of(self._seed, epoch, 1)
        shards, begins = array("i", bytes(4 * size)), array("q", bytes(8 * (size + 1)))
        permuted = np.frombuffer(shards, np.int32)
        for begin in range(0, size, _STRETCH):
            places = np.arange(begin, min(size, begin + _STRETCH), dtype=np.uint64)
            permuted[begin : begin + _STRETCH] = permute(places, size, key)
        np.cumsum(self._array[permuted], out=np.frombuffer(begins, np.int64)[1:])
        return shards, begins

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of the sequence at each position, and the index of the sequence in its shard."""
        periods, turns = np.divmod(positions, len(self._turns))
        groups, nth = self._turn_groups[turns], periods * self._share + self._earlier_turns[turns]
        epochs = positions // self.epoch_size
        shards, indexes = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            shards[inside], indexes[inside] = self._within(epoch, groups[inside], nth[inside])
        return shards, indexes

    def locate(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards and indices of the sequences at the positions from `start` to `stop` - 1, as `at` does.

        The positions may be in several epochs.
        """
        return self.at(np.arange(start, stop, dtype=np.int64))

    def _within(
        self, epoch: int, groups: NDArray[np.int64], nth: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return shards and indices as `at` does, for sequences of one epoch.

        A sequence is given by its group, and by its number `nth` among the sequences of that group in the epoch.
        """
        tables = self._epoch(epoch)
        shards, begins = np.frombuffer(tables.shards, np.int32), np.frombuffer(tables.begins, np.int64)
        parts = np.frombuffer(tables.parts, np.int64)
        unshuffled = parts[groups] + nth - np.array(tables.taken)[groups]
        windows = (np.searchsorted(begins, unshuffled, side="right") - 1) // self.window
        several, which = np.unique(windows * self.groups + groups, return_inverse=True)
        window, group = np.divmod(several, self.groups)
        first = np.maximum(begins[window * self.window], parts[group])
        last = np.minimum(begins[np.minimum((window + 1) * self.window, len(shards))], parts[group + 1])
        keys = [key_of(self._seed, epoch, 2, number) for number in window.tolist()]
        begin = first[which]
        shuffled = begin + permute_each((unshuffled - begin).astype(np.uint64), last - first, keys, which).astype(
            np.int64
        )
        places = np.searchsorted(begins, shuffled, side="right") - 1
        return shards[places].astype(np.int64), shuffled - begins[places]


def by_group(groups: NDArray[np.int64], modulus: int) -> NDArray[np.intp]:
    """Return the indices that sort sequences, given their groups, into the order of `concertina_data.order.by_group`.

    `modulus` is the number of classes of groups.
    """
    return np.lexsort((groups, groups % modulus))


class Skipped:
    """Positions of the data that a run never consumes, as sorted ranges [begin, end) that do not overlap.

    `position_of` maps the number of a consumed sequence to its position. A new range does not change the positions of
    sequences that were consumed before it, so ranges can be added during a run.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]] = ()) -> None:
        """Store the skipped ranges `stretches`.

        Raises:
            ValueError: When the ranges are not sorted, or overlap.
        """
        begins, ends = (
            np.array(edges, dtype=np.int64) for edges in (zip(*stretches, strict=True) if stretches else ((), ()))
        )
        if (begins >= ends).any() or (begins[1:] < ends[:-1]).any():
            raise ValueError(
                f"skipped positions must be sorted ranges that don't overlap, but they are {list(stretches)[:9]}"
            )
        self._skipped = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)])
        self._reached = begins - self._skipped[:-1]

    def position_of(self, consumed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the n-th consumed sequence, counted from 0, for each n in `consumed`."""
        positions: NDArray[np.int64] = consumed + self._skipped[np.searchsorted(self._reached, consumed, side="right")]
        return positions
