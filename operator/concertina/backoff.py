"""Exponential backoff with jitter."""

from __future__ import annotations

import random


def seconds(failures: int, first: float, longest: float) -> float:
    """Return the delay before the next attempt, in seconds.

    The delay begins with `first`, doubles with each failure and is at most `longest`. It then varies at random by up to
    20%, so that callers that failed together do not retry together.

    Args:
        failures: Number of failures in a row so far, from 0.
        first: Delay in seconds if `failures` is 0.
        longest: Maximum delay in seconds, before the random variation.
    """
    return float(min(first * 2 ** min(failures, 32), longest)) * random.uniform(0.8, 1.2)
