"""Number of sequences of the global batch for each rank, if it follows the rank's speed. Pure; no torch.

A synchronous step ends with its last rank. Sequences are whole, so the division of them that ends soonest is the
divisor method of D'Hondt and Jefferson (Balinski and Young, Fair Representation, 1982): under a time limit T each rank
takes floor(T / its seconds per sequence), and T is the greatest that the batch allows (decision "Batch shares by
speed").
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

BOUND = 2
"""Bound of shares: from 1/BOUND to BOUND times the even one.

A greater difference means a broken machine, not a slow one.
"""
LEAST_GAIN = 0.1
"""Minimum part of the step's time that a change of shares must save. Measurement errors of 5 % promise less."""
_HALVINGS = 60

Shares = tuple[int, ...]


def even(total: int, world: int) -> Shares:
    """Return contiguous slices of about the same size, as `BatchPlan.slices` cuts them without shares."""
    edges = [total * rank // world for rank in range(world + 1)]
    return tuple(end - begin for begin, end in itertools.pairwise(edges))


def soonest(total: int, seconds: Sequence[float]) -> Shares:
    """Return shares of `total` sequences, within the bounds, with which the last rank finishes soonest.

    `seconds` is the time that each rank takes for one sequence, positive. A faster rank never has less. A rank computes
    at least one sequence, so a batch with fewer sequences than ranks is divided evenly.
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
    """Return the shares of the batch for the next steps, in number of sequences for each rank.

    They differ from `shares` only if they shorten the step by at least the part LEAST_GAIN of it. If a value of
    `seconds` can't be a measured time (negative, nan), they are `shares`.
    """
    if not all(math.isfinite(own_seconds) and own_seconds > 0 for own_seconds in seconds):
        return shares
    better = soonest(sum(shares), seconds)
    return better if _end(better, seconds) <= (1 - LEAST_GAIN) * _end(shares, seconds) else shares


def _end(shares: Shares, seconds: Sequence[float]) -> float:
    return max(share * own_seconds for share, own_seconds in zip(shares, seconds, strict=True))
