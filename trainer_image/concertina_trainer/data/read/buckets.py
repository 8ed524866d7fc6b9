"""Buckets of one global batch: sequences of similar length that are computed together, planned from the lengths alone.

Order and gradient are those of the batch, however it is divided: only the padding is less. All ranks compute the same
shapes, as their collectives need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concertina_trainer.data.read.batch import BatchPlan, plan_batch

HALVINGS = 3
"""Number of halvings: there are buckets for the whole length, its half, its quarter and its eighth."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length."""

    length: int
    sequences: NDArray[np.int64]
    """Indices of the sequences in the batch, in its order."""
    plan: BatchPlan


def buckets(lengths: NDArray[np.int64], longest: int, micro_size: int, world: int) -> Iterator[Bucket]:
    """Yield the buckets of sequences, given how many tokens each predicts.

    A microbatch of shorter sequences has proportionally more rows, so that each has about `micro_size` * `longest`
    tokens.
    """
    edges = [math.ceil(longest / 2**halving) for halving in range(HALVINGS, -1, -1)]
    bucket_of = np.searchsorted(edges, lengths)
    for index in reversed(range(len(edges))):
        sequences = np.flatnonzero(bucket_of == index)
        if len(sequences):
            rows = micro_size * longest // edges[index]
            yield Bucket(edges[index], sequences, plan_batch(len(sequences), rows, world))
