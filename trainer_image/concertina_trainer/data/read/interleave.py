"""Source of each position of a mixture, in plain integers: no numpy.

Weights are whole numbers, so the pattern repeats after their sum, and a table gives any position (decision "A mixture
is a periodic table"). The table is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32,
1980): after n positions a source of share w has been chosen c times with |c - w * n| <= 1 - 1 / (2k - 2) for k sources.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence


def reduced(weights: Sequence[int]) -> list[int]:
    """Return the weights without their common divisor. The period has the length of their sum."""
    divisor = math.gcd(*weights)
    return [weight // divisor for weight in weights]


def before(weights: Sequence[int], position: int) -> list[int]:
    """Return how many positions before `position` each source has."""
    shares = reduced(weights)
    table = period(shares)
    periods, offset = divmod(position, len(table))
    counts = Counter(table[:offset])
    return [periods * share + counts[source] for source, share in enumerate(shares)]


def period(weights: Sequence[int]) -> list[int]:
    """Return the source of each position of one period.

    The j-th position of source i can be chosen if w_i * n - (j - 1) >= 1 / (2k - 2). Of those that can be chosen, the
    one with the earliest deadline is. All computations are in whole numbers, with n counting from 1.
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
    """Return the first n with weight * n / total - (nth - 1) >= 1 / slack."""
    return -(-((nth - 1) * slack + 1) * total // (slack * weight))
