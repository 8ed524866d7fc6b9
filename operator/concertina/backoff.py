"""Exponential backoff with jitter."""

from __future__ import annotations

import random


def seconds(failures: int, first: float, longest: float) -> float:
    """Return the delay in seconds before the next attempt.

    The delay is `first` at the beginning, doubles with each failure, and is at most `longest`. A random variation of up
    to 20% is applied, so that callers that failed at the same time retry at different times.

    Args:
        failures: Number of consecutive failures.
        first: Delay in seconds for zero failures.
        longest: Maximum delay in seconds, before the random variation.
    """
    return float(min(first * 2 ** min(failures, 32), longest)) * random.uniform(0.8, 1.2)
