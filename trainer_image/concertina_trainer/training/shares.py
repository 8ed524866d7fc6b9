"""Shares of the global batch: the number of sequences for each rank, if the shares follow the ranks' speed.

A synchronous step ends when its last rank has finished. Sequences can't be divided, so the divisor method of D'Hondt
and Jefferson gives the shares with which the step ends soonest (Balinski and Young, Fair Representation, 1982). Under a
time limit T, a rank's share is floor(T / the rank's seconds per sequence). T is the greatest limit under which the sum
of the shares does not exceed the batch (decision "Batch shares by speed"). All functions are pure, and the module does
not import torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

BOUND = 2
"""Bound of a rank's share: between 1/BOUND and BOUND times the even share.

A greater difference in speed means that a machine is broken, not that it is slow.
"""
LEAST_GAIN = 0.1
"""Minimum fraction of the step's time that a change of shares must save.

Measurement errors of 5 % can simulate smaller savings, which must not change the shares.
"""
_HALVINGS = 60

Shares = tuple[int, ...]


def even(total: int, world: int) -> Shares:
    """Return even shares: the sizes of the contiguous slices into which `BatchPlan.slices` cuts a batch by default."""
    edges = [total * rank // world for rank in range(world + 1)]
    return tuple(end - begin for begin, end in itertools.pairwise(edges))


def soonest(total: int, seconds: Sequence[float]) -> Shares:
    """Return shares of `total` sequences with which the last rank finishes soonest.

    A share is at most BOUND times the even share, and at least the even share divided by BOUND. `seconds` is the
    positive time that each rank takes for one sequence. A faster rank never gets fewer sequences than a slower one.
    Each rank gets at least one sequence. If there are fewer sequences than ranks, the batch is divided evenly.
    """
    world = len(seconds)
    if total < world:
        return even(total, world)
    smallest, largest = max(1, total // (BOUND * world)), math.ceil(BOUND * total / world)

    def within(limit: float) -> list[int]:
        return [max(smallest, min(largest, int(limit / own_seconds))) for own_seconds in seconds]

    low, high = 0.0, max(seconds) * (largest + 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= total else (low, middle)
    shares = within(low)
    ends = [
        ((shares[rank] + 1) * seconds[rank], seconds[rank], rank) for rank in range(world) if shares[rank] < largest
    ]
    heapq.heapify(ends)
    for _ in range(total - sum(shares)):  # ranks that finish at the same time
        _, own_seconds, rank = heapq.heappop(ends)
        shares[rank] += 1
        if shares[rank] < largest:
            heapq.heappush(ends, ((shares[rank] + 1) * own_seconds, own_seconds, rank))
    return tuple(shares)


def rebalanced(shares: Shares, seconds: Sequence[float]) -> Shares:
    """Return the shares of the batch for the next steps: the number of sequences of each rank.

    `seconds` is the measured time that each rank takes for one sequence. New shares are returned only if they shorten
    the step by at least the fraction LEAST_GAIN. Otherwise, and if a value of `seconds` is not positive and finite, the
    result is `shares`.
    """
    if not all(math.isfinite(own_seconds) and own_seconds > 0 for own_seconds in seconds):
        return shares
    better = soonest(sum(shares), seconds)
    return better if _end(better, seconds) <= (1 - LEAST_GAIN) * _end(shares, seconds) else shares


def _end(shares: Shares, seconds: Sequence[float]) -> float:
    return max(share * own_seconds for share, own_seconds in zip(shares, seconds, strict=True))
