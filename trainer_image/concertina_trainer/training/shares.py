"""How many sequences of the global batch each rank takes, where that follows its speed. Pure; no torch.

A synchronous step ends with its last rank. Sequences are whole, so the division of them that ends soonest is the
divisor method of D'Hondt and Jefferson (Balinski and Young, Fair Representation, 1982): under a limit of time T each
rank takes floor(T / its seconds a sequence), and T is the greatest that the batch allows (decision "Shares by speed:
the soonest end").
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

BOUND = 2
"""A share is from 1/BOUND to BOUND times the even one: more is a broken machine, not a slow one."""
LEAST_GAIN = 0.1
"""Of the step's time, for which shares are changed. Measurements 5 % off, either way, promise less."""
_HALVINGS = 60

Shares = tuple[int, ...]


def even(total: int, world: int) -> Shares:
    """Contiguous slices of about the same size, as `BatchPlan.parts` cuts them without shares."""
    edges = [total * rank // world for rank in range(world + 1)]
    return tuple(end - begin for begin, end in itertools.pairwise(edges))


def soonest(total: int, seconds: Sequence[float]) -> Shares:
    """Shares of `total` sequences, within the bounds, with which the last rank is done soonest; `seconds`: that each
    rank takes for one, positive. Who is faster never has less. A rank computes one at least, so a batch of fewer
    sequences than ranks stays as it is."""
    world = len(seconds)
    if total < world:
        return even(total, world)
    least, most = max(1, total // (BOUND * world)), math.ceil(BOUND * total / world)

    def within(limit: float) -> list[int]:
        return [max(least, min(most, int(limit / each))) for each in seconds]

    low, high = 0.0, max(seconds) * (most + 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= total else (low, middle)
    shares = within(low)
    ends = [((shares[rank] + 1) * seconds[rank], seconds[rank], rank) for rank in range(world) if shares[rank] < most]
    heapq.heapify(ends)
    for _ in range(total - sum(shares)):  # those that end at the same time
        _, each, rank = heapq.heappop(ends)
        shares[rank] += 1
        if shares[rank] < most:
            heapq.heappush(ends, ((shares[rank] + 1) * each, each, rank))
    return tuple(shares)


def rebalanced(shares: Shares, seconds: Sequence[float]) -> Shares:
    """The shares to go on with: other ones only where that makes the step shorter by LEAST_GAIN. What can't be a
    measurement changes nothing."""
    if not all(math.isfinite(each) and each > 0 for each in seconds):
        return shares
    better = soonest(sum(shares), seconds)
    return better if _end(better, seconds) <= (1 - LEAST_GAIN) * _end(shares, seconds) else shares


def _end(shares: Shares, seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))
