"""How long the operator waits before it tries again."""

from __future__ import annotations

import random


def seconds(failures: int, first: float, longest: float) -> float:
    """After so many failures in a row (from 0 on): `first`, doubled with each, at most `longest`; give or take a fifth,
    so that those that failed together do not come again together."""
    return float(min(first * 2 ** min(failures, 32), longest)) * random.uniform(0.8, 1.2)
