"""Choice of the data set from which each position of a mixture is taken, by numpy for many positions at once.

The result is the same as that of `interleave`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from concertina_trainer.data.read import interleave

_Numbers = NDArray[np.int64]


class Interleave:
    """Mixture of the sources 0 ... k-1, given their weights, which are positive integers.

    The class also divides the positions among groups of shards. Positions are taken in blocks of `groups` consecutive
    positions, and each group has one position in each block. If the groups simply took turns, a group could get the
    sequences of only some sources, because sources follow a repeating pattern too. The turns therefore move by one
    group after each common multiple of the two periods. In this way, each group gets each position of the pattern of
    sources equally often.
    """

    def __init__(self, weights: Sequence[int], groups: int = 1) -> None:
        self._weights = np.array(interleave.reduced(weights), dtype=np.int64)
        self._table = np.array(interleave.period(self._weights.tolist()), dtype=np.int64)
        self._before = np.zeros(len(self._table), dtype=np.int64)
        for source in range(len(weights)):
            of_source = self._table == source
            self._before[of_source] = np.arange(int(of_source.sum()))
        self.groups = groups
        self._common = math.lcm(groups, len(self._table))
        self._moves = math.gcd(groups, len(self._table))

    def group(self, positions: _Numbers) -> _Numbers:
        """Return the group of each position."""
        groups: _Numbers = (positions + positions // self._common % self._moves) % self.groups
        return groups

    def turns(self, source: int) -> _Numbers:
        """Return the group of each sequence of a source, for one period. Each group occurs equally often."""
        positions = np.arange(self._common * self._moves)
        turns: _Numbers = self.group(positions[self._table[positions % len(self._table)] == source])
        return turns

    def at(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the source of each position, and the number of earlier positions with the same source."""
        period, offset = np.divmod(positions, len(self._table))
        sources = self._table[offset]
        return sources, period * self._weights[sources] + self._before[offset]

    def before(self, position: int) -> list[int]:
        """Return, for each source, how many of the positions before `position` are taken from the source."""
        period, offset = divmod(position, len(self._table))
        partial_counts = np.bincount(self._table[:offset], minlength=len(self._weights))
        return [int(count) for count in period * self._weights + partial_counts]
