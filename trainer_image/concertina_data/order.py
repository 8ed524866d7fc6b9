"""Order of the sequences of a data set.

The sequence at a position depends only on the shards, the seed and the position.

An epoch visits every sequence once. It permutes the shards and divides them into windows of WINDOW shards. Within a
window, it permutes all sequences, so a reader needs no more than WINDOW shards at a time (decision "Data order in two
levels"). Both permutations are keyed Feistel networks with cycle walking. They need no table of sequences and no state,
so any position can be computed by itself.

This module computes with plain integers. `concertina_trainer.data.batch_order` computes many positions at once.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections.abc import Sequence

WINDOW = 16
ROUNDS = 6
_TABLE_BITS = 12
"""Largest half of a network, in bits, for which the round functions are tabulated.

Building a table takes some milliseconds. With the tables, a position is computed in half a microsecond.
"""
_MASK = 2**64 - 1


class Permutation:
    """Permutation of 0 ... size-1, chosen by `key` (64 bits)."""

    def __init__(self, size: int, key: int) -> None:
        self._size, self._half = size, half_bits(size)
        self._keys = [mixed(key + i) for i in range(ROUNDS)]
        mask, tabulated = (1 << self._half) - 1, self._half <= _TABLE_BITS
        self._tables = [[mix(right ^ key) & mask for right in range(mask + 1)] for key in self._keys if tabulated]

    def at(self, value: int) -> int:
        value = self._network(value)
        while value >= self._size:  # the network permutes a power of 4 >= size: repeat until the value is below size
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        if self._tables:
            for table in self._tables:
                left, right = right, left ^ table[right]
        else:
            for key in self._keys:
                left, right = right, left ^ (mix(right ^ key) & mask)
        return left << self._half | right


def half_bits(size: int) -> int:
    return max(1, ((size - 1).bit_length() + 1) // 2)


def mix(x: int) -> int:
    """Return `x` with its bits mixed by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def mixed(x: int) -> int:
    """Return a pseudorandom 64-bit number for `x`: the result of one step of SplitMix64."""
    return mix(x + 0x9E3779B97F4A7C15 & _MASK)


def key_of(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = mixed(key ^ number)
    return key


class Order:
    """Order of the sequences of shards; shard number i has `counts[i]` sequences."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        """Prepare the order in which the sequences of all shards are visited.

        Args:
            counts: Number of sequences in each shard.
            seed: Seed of the order.

        Raises:
            ValueError: When no shard has a whole sequence.
        """
        self._counts, self._seed = counts, seed
        self.epoch_size = self._total()
        if not self.epoch_size:
            raise ValueError("no shard is as long as one sequence")
        self._epoch = functools.lru_cache(maxsize=2)(self._epoch_tables)
        self._window = functools.lru_cache(maxsize=2)(self._permuted_window)

    def _total(self) -> int:
        return sum(self._counts)

    def _epoch_tables(self, epoch: int) -> tuple[array[int], array[int]]:
        """Return the shards in the order of this epoch, and how many sequences come before each shard."""
        permutation = Permutation(len(self._counts), key_of(self._seed, epoch, 1))
        shards, begins = array("i", map(permutation.at, range(len(self._counts)))), array("q", [0])
        for shard in shards:
            begins.append(begins[-1] + self._counts[shard])
        return shards, begins

    def _permuted_window(self, epoch: int, window: int) -> tuple[int, Permutation]:
        """Return the first sequence of a window, and the permutation of the window's sequences.

        The first sequence is given as its number in the epoch before sequences are permuted.
        """
        _, begins = self._epoch(epoch)
        first, last = begins[window * WINDOW], begins[min((window + 1) * WINDOW, len(begins) - 1)]
        return first, Permutation(last - first, key_of(self._seed, epoch, 2, window))

    def find(self, position: int) -> tuple[int, int]:
        """Return the shard that contains the sequence at a position, and the sequence's index in that shard."""
        epoch, offset = divmod(position, self.epoch_size)
        shards, begins = self._epoch(epoch)
        first, permutation = self._window(epoch, (bisect_right(begins, offset) - 1) // WINDOW)
        shuffled = first + permutation.at(offset - first)
        index = bisect_right(begins, shuffled) - 1
        return shards[index], shuffled - begins[index]

    def nearby(self, position: int) -> list[int]:
        """Return the shards that a reader needs next: those of the position's window, then those of the next window."""
        epoch, offset = divmod(position, self.epoch_size)
        shards, begins = self._epoch(epoch)
        first = (bisect_right(begins, offset) - 1) // WINDOW * WINDOW
        nearby_shards = [*shards[first : first + 2 * WINDOW]]
        if first + WINDOW >= len(shards):
            nearby_shards += self._epoch(epoch + 1)[0][:WINDOW]
        return [shard for shard in dict.fromkeys(nearby_shards) if self._counts[shard]]
