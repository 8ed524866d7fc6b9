"""Sequences of one global batch, computed with others of about their length: planned from the lengths alone.

Order and gradient are those of the batch, whatever is computed with what: only the filling is less. All ranks run the
same shapes, as their collectives need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concertina_trainer.data.read.batch import BatchPlan, plan_batch

HALVINGS = 3
"""Buckets are for the whole length, its half, its quarter and its eighth."""


@dataclass(frozen=True)
class Bucket:
    length: int
    sequences: NDArray[np.int64]
    """Which of the batch, in its order."""
    plan: BatchPlan


def buckets(lengths: NDArray[np.int64], longest: int, micro_size: int, world: int) -> Iterator[Bucket]:
    """For sequences that predict so many tokens each. A microbatch of shorter ones has as many rows more as they are
    shorter, so that each has about `micro_size` * `longest` tokens."""
    edges = [math.ceil(longest / 2**halving) for halving in range(HALVINGS, -1, -1)]
    bucket_of = np.searchsorted(edges, lengths)
    for index in reversed(range(len(edges))):
        sequences = np.flatnonzero(bucket_of == index)
        if len(sequences):
            rows = micro_size * longest // edges[index]
            yield Bucket(edges[index], sequences, plan_batch(len(sequences), rows, world))
