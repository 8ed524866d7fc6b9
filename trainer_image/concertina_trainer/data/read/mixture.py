"""Which source stands at which position of a mixture, and the how-manieth of that source it is: exact at any prefix.

Weights are whole numbers, so the pattern repeats after their sum, and any position is found by one look at a table
(decision "A mixture is a periodic table"). The table is Tijdeman's solution of the chairman assignment problem
(Discrete Mathematics 32, 1980): after n positions a source of share w has been taken c times with
|c - w * n| <= 1 - 1 / (2k - 2) for k sources.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


class Interleave:
    """The sources 0 ... k-1 by their weights, which are positive."""

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = math.gcd(*weights)
        self._weights = np.array(weights, dtype=np.int64) // divisor
        self._table = _period(self._weights.tolist())
        self._before = np.zeros(len(self._table), dtype=np.int64)
        for source in range(len(weights)):
            taken = self._table == source
            self._before[taken] = np.arange(int(taken.sum()))

    def at(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """The source of each position, and how many positions before it are of the same source."""
        period, place = np.divmod(positions, len(self._table))
        sources = self._table[place]
        return sources, period * self._weights[sources] + self._before[place]

    def before(self, position: int) -> list[int]:
        """How many positions before this one are of each source."""
        period, place = divmod(position, len(self._table))
        rest = np.bincount(self._table[:place], minlength=len(self._weights))
        return [int(count) for count in period * self._weights + rest]


def _period(weights: Sequence[int]) -> _Numbers:
    """The source of each position of one period.

    The j-th of source i may stand where w_i * n - (j - 1) >= 1 / (2k - 2), and of those that may, the one that must
    come first is taken: all in whole numbers, n counting from 1."""
    total, slack = sum(weights), 2 * max(2, len(weights)) - 2
    waiting = [(_release(weight, 1, total, slack), source) for source, weight in enumerate(weights)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    taken = [0] * len(weights)
    table = np.empty(total, dtype=np.int64)
    for n in range(1, total + 1):
        while waiting and waiting[0][0] <= n:
            _, source = heapq.heappop(waiting)
            deadline = ((taken[source] + 1) * slack - 1) * total // (slack * weights[source])
            heapq.heappush(ready, (deadline, source))
        _, source = heapq.heappop(ready)
        table[n - 1] = source
        taken[source] += 1
        if taken[source] < weights[source]:
            heapq.heappush(waiting, (_release(weights[source], taken[source] + 1, total, slack), source))
    return table


def _release(weight: int, nth: int, total: int, slack: int) -> int:
    """The first n with weight * n / total - (nth - 1) >= 1 / slack."""
    return -(-((nth - 1) * slack + 1) * total // (slack * weight))
