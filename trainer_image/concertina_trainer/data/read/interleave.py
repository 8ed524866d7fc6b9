"""Choice of the data set from which each position of a mixture is taken, in plain integers without numpy.

Weights are integers, so the pattern repeats after a period, whose length is the sum of the weights. A table of one
period is therefore enough (decision "Data set mixtures follow a repeating pattern"). The pattern is Tijdeman's solution
of the chairman assignment problem (Discrete Mathematics 32, 1980). The pattern keeps each source close to its share:
for k sources, a source with share w has been chosen c times after n positions, with |c - w * n| <= 1 - 1 / (2k - 2).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence


def reduced(weights: Sequence[int]) -> list[int]:
    """Return the weights divided by their greatest common divisor.

    The sum of the result is the length of the period, after which the choice of sources repeats.
    """
    divisor = math.gcd(*weights)
    return [weight // divisor for weight in weights]


def before(weights: Sequence[int], position: int) -> list[int]:
    """Return, for each source, how many of the positions before `position` are taken from the source."""
    shares = reduced(weights)
    table = period(shares)
    periods, offset = divmod(position, len(table))
    counts = Counter(table[:offset])
    return [periods * share + counts[source] for source, share in enumerate(shares)]


def period(weights: Sequence[int]) -> list[int]:
    """Return the source of each position in one period of the pattern.

    Positions n are counted from 1, and all computations use integers. Source i may be chosen for the j-th time as soon
    as w_i * n - (j - 1) >= 1 / (2k - 2). Among the sources that may be chosen for a position, the one with the earliest
    deadline is chosen.
    """
    total, slack = sum(weights), 2 * max(2, len(weights)) - 2
    waiting = [(_release(weight, 1, total, slack), source) for source, weight in enumerate(weights)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    chosen_counts = [0] * len(weights)
    table = [0] * total
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
    """Return the first position n at which a source may be chosen for the time number `nth` (see `period`).

    This is the smallest n with weight * n / total - (nth - 1) >= 1 / slack.
    """
    return -(-((nth - 1) * slack + 1) * total // (slack * weight))
