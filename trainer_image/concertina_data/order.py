"""Order of the sequences of a data set.

The sequence at a position depends only on the shards, the seed, the number of groups and the position.

An epoch visits every sequence once. It permutes the shards and divides their sequences into groups of equal size. The
groups take turns: with 16 groups, every 16th position belongs to the same group. Each group divides its shards into
windows, and permutes all sequences within a window. The windows of all groups together contain WINDOW shards, or one
shard for each group if there are more than WINDOW groups. Usually, a reader of all groups therefore needs at most
WINDOW shards at a time, and a reader of one group needs one shard (decisions "Data order in two levels" and "Groups of
shards"). Both permutations are keyed Feistel networks with cycle walking. They need no table of sequences and no state,
so any position can be computed by itself.

This module computes with plain integers. `concertina_trainer.data.batch_order` computes many positions at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WINDOW = 16
"""Total number of shards in the windows of all groups, if there are at most this many groups."""
GROUPS = 16
"""Default number of groups."""
MOST_GROUPS = 1024
ROUNDS = 6
_TABLE_BITS = 12
"""Maximum size, in bits, of half a network for which tables of the round functions are made.

Building a table takes some milliseconds. With the tables, a position is computed in half a microsecond.
"""
_MASK = 2**64 - 1


class Permutation:
    """Permutation of the numbers from 0 to `size` - 1, selected by the 64-bit `key`."""

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
    """Return a pseudorandom 64-bit number for `x`, by one step of SplitMix64."""
    return mix(x + 0x9E3779B97F4A7C15 & _MASK)


def key_of(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = mixed(key ^ number)
    return key


class Epoch(NamedTuple):
    """Tables that describe the order of one epoch."""

    shards: array[int]
    """Shards in the order of the epoch. A *place* is an index of this array."""
    begins: array[int]
    """Number of sequences in the shards before each place, and the total at the end."""
    parts: array[int]
    """First sequence of each group, in the numbering of `begins`, and the total number of sequences at the end."""
    taken: Sequence[int]
    """Number of sequences that each group has consumed in earlier epochs."""


class Order:
    """Order of the sequences of shards. Shard number i has `counts[i]` sequences."""

    def __init__(self, counts: Sequence[int], seed: int, turns: Sequence[int] = (0,)) -> None:
        """Prepare the order in which the sequences of all shards are visited.

        Args:
            counts: Number of sequences in each shard.
            seed: Seed of the order.
            turns: Group of each position. The pattern repeats, and contains each group equally often.

        Raises:
            ValueError: When no shard has a whole sequence.
        """
        self._counts, self._seed, self._turns = counts, seed, turns
        self.groups = max(turns) + 1
        self._share = len(turns) // self.groups
        """Number of positions of each group in one period of the pattern `turns`."""
        self.window = max(1, WINDOW // self.groups)
        """Number of shards of a window of one group."""
        self._places = _places(turns, self.groups)
        self._earlier = _earlier(turns)
        self.epoch_size = self._total()
        if not self.epoch_size:
            raise ValueError("no shard is as long as one sequence")
        self.stride = max(1, self.epoch_size // (4 * len(counts)))
        """Number of positions after which `nearby` should be computed again: a quarter of an average shard."""
        self._epoch = functools.lru_cache(maxsize=2)(self._epoch_tables)
        self._window = functools.lru_cache(maxsize=2 * self.groups)(self._permuted_window)

    def _total(self) -> int:
        return sum(self._counts)

    def _epoch_tables(self, epoch: int) -> Epoch:
        """Return the tables of an epoch."""
        shards, begins = self._in_order(epoch)
        taken, later = self._taken(epoch * self.epoch_size), self._taken((epoch + 1) * self.epoch_size)
        sizes = [after - before for before, after in zip(taken, later)]
        return Epoch(shards, begins, array("q", itertools.accumulate(sizes, initial=0)), taken)

    def _in_order(self, epoch: int) -> tuple[array[int], array[int]]:
        """Return the shards in the order of this epoch, and the number of sequences before each shard."""
        permutation = Permutation(len(self._counts), key_of(self._seed, epoch, 1))
        shards, begins = array("i", map(permutation.at, range(len(self._counts)))), array("q", [0])
        for shard in shards:
            begins.append(begins[-1] + self._counts[shard])
        return shards, begins

    def _taken(self, position: int) -> list[int]:
        """Return, for each group, how many positions before `position` belong to the group."""
        periods, offset = divmod(position, len(self._turns))
        return [periods * self._share + bisect_left(places, offset) for places in self._places]

    def _permuted_window(self, epoch: int, group: int, window: int) -> tuple[int, Permutation]:
        """Return the number of the first sequence in a group's window, and the permutation of the window's sequences.

        The number is that in the epoch's order before sequences are permuted within windows.
        """
        _, begins, parts, _ = self._epoch(epoch)
        last_place = min((window + 1) * self.window, len(begins) - 1)
        first, last = max(begins[window * self.window], parts[group]), min(begins[last_place], parts[group + 1])
        return first, Permutation(last - first, key_of(self._seed, epoch, 2, window))

    def find(self, position: int) -> tuple[int, int]:
        """Return the shard that contains the sequence at a position, and the sequence's index in that shard."""
        epoch, turn = position // self.epoch_size, position % len(self._turns)
        shards, begins, parts, taken = self._epoch(epoch)
        group = self._turns[turn]
        nth = position // len(self._turns) * self._share + self._earlier[turn]
        unshuffled = parts[group] + nth - taken[group]
        first, permutation = self._window(epoch, group, (bisect_right(begins, unshuffled) - 1) // self.window)
        shuffled = first + permutation.at(unshuffled - first)
        index = bisect_right(begins, shuffled) - 1
        return shards[index], shuffled - begins[index]

    def nearby(self, position: int, groups: Iterable[int] | None = None) -> list[int]:
        """Return the shards that a reader of `groups`, or of all groups by default, needs next.

        The result lists the shards of each group's window at the position, and then the shards of each group's next
        window.
        """
        epoch, taken = position // self.epoch_size, self._taken(position)
        now, later = list[int](), list[int]()
        for group in range(self.groups) if groups is None else groups:
            tables = self._epoch(epoch)
            nth = tables.parts[group] + taken[group] - tables.taken[group]
            windows = self._windows(epoch, group, nth)
            if len(windows) < 2:
                windows += self._windows(epoch + 1, group, self._epoch(epoch + 1).parts[group])
            for some, shards in zip((now, later), windows):
                some += shards
        return [shard for shard in dict.fromkeys(now + later) if self._counts[shard]]

    def _windows(self, epoch: int, group: int, begin: int) -> list[array[int]]:
        """Return the shards of the window that contains the sequence `begin`, and of the group's next window.

        A group of shards is divided into windows. The sequence is given as its number in the epoch before sequences are
        permuted. The result is shorter at the end of the epoch.
        """
        shards, begins, parts, _ = self._epoch(epoch)
        end = parts[group + 1]
        if begin >= end:
            return []
        first, last = (bisect_right(begins, sequence) - 1 for sequence in (parts[group], end - 1))
        place = (bisect_right(begins, begin) - 1) // self.window * self.window
        edges = [place, place + self.window, place + 2 * self.window]
        cuts = [shards[max(first, edges[i]) : min(last + 1, edges[i + 1])] for i in range(2)]
        return [cut for cut in cuts if cut]


def _places(turns: Sequence[int], groups: int) -> list[array[int]]:
    """Return the indices in `turns` at which each group occurs, in ascending order.

    `turns` contains the group of each position.
    """
    places = [array("q") for _ in range(groups)]
    for turn, group in enumerate(turns):
        places[group].append(turn)
    return places


def _earlier(turns: Sequence[int]) -> list[int]:
    """Return, for each entry of `turns`, how many earlier entries have the same group."""
    counts, earlier = Counter[int](), list[int]()
    for group in turns:
        earlier.append(counts[group])
        counts[group] += 1
    return earlier


def classes(batch: int, groups: int) -> int:
    """Return the number of classes of groups for batches of this size: the greatest common divisor of both numbers.

    Two groups are in the same class if their group numbers are equal modulo the number of classes. Ranks take the
    sequences of a batch class by class, so that a rank reads the same few groups in all batches.
    """
    return math.gcd(batch, groups)


def by_group(batch: range, groups: int) -> list[int]:
    """Return the positions of a batch in the order in which ranks share them: by class, then by group."""
    modulus = classes(len(batch), groups)
    return sorted(batch, key=lambda position: (position % groups % modulus, position % groups))
