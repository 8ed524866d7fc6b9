"""Source of each position of a mixture, and the number of earlier positions with that source: exact at any prefix.

Weights are whole numbers, so the pattern repeats after their sum, and a table gives any position (decision "A mixture
is a periodic table"). The table is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32,
1980): after n positions a source of share w has been chosen c times with |c - w * n| <= 1 - 1 / (2k - 2) for k sources.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


class Interleave:
    """Sources 0 ... k-1 by their weights, which are positive."""

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = math.gcd(*weights)
        self._weights = np.array(weights, dtype=np.int64) // divisor
        self._table = _period(self._weights.tolist())
        self._before = np.zeros(len(self._table), dtype=np.int64)
        for source in range(len(weights)):
            of_source = self._table == source
            self._before[of_source] = np.arange(int(of_source.sum()))

    def at(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return the source of each position, and how many positions before it have the same source."""
        period, offset = np.divmod(positions, len(self._table))
        sources = self._table[offset]
        return sources, period * self._weights[sources] + self._before[offset]

    def before(self, position: int) -> list[int]:
        """Return how many positions before this one each source has."""
        period, offset = divmod(position, len(self._table))
        partial_counts = np.bincount(self._table[:offset], minlength=len(self._weights))
        return [int(count) for count in period * self._weights + partial_counts]


def _period(weights: Sequence[int]) -> _Numbers:
    """Return the source of each position of one period.

    The j-th position of source i can be chosen if w_i * n - (j - 1) >= 1 / (2k - 2). Of those that can be chosen, the
    one with the earliest deadline is. All computations are in whole numbers, with n counting from 1.
    """
    total, slack = sum(weights), 2 * max(2, len(weights)) - 2
    waiting = [(_release(weight, 1, total, slack), source) for source, weight in enumerate(weights)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    chosen_counts = [0] * len(weights)
    table = np.empty(total, dtype=np.int64)
    for n in range(1, total + 1):
        while waiting and waiting[0][0] <= n:
            _, source = heapq.heappop(waiting)
            deadline = ((chosen_counts[source] + 1) * slack - 1) * total // (slack * weights[source])
            heapq.heappush(ready, (deadline, source))
        _, source = heapq.heappop(ready)
        table[n - 1] = source
        chosen_counts[source] += 1
        if chosen_counts[source] < weights[source]:
            heapq.heappush(waiting, (_release(weights[source], chosen_counts[source] + 1, total, slack), source))
    return table


def _release(weight: int, nth: int, total: int, slack: int) -> int:
    """Return the first n with weight * n / total - (nth - 1) >= 1 / slack."""
    return -(-((nth - 1) * slack + 1) * total // (slack * weight))
