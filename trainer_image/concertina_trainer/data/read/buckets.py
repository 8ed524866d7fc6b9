"""Division of a global batch into buckets of sequences of similar length, which need less padding.

The gradient is the same as without buckets. Buckets are computed from the lengths of the whole batch, so all ranks
compute microbatches of the same shapes, as collectives require.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concertina_trainer.data.read.batch import BatchPlan, plan_batch

HALVINGS = 3
"""Number of times that the sequence length is halved for smaller buckets.

The buckets are for 1, 1/2, 1/4 and 1/8 of the sequence length.
"""


@dataclass(frozen=True)
class Bucket:
    """Sequences of a batch that are of similar length."""

    length: int
    sequences: NDArray[np.int64]
    """Indices of the sequences in the batch, in increasing order."""
    plan: BatchPlan


def buckets(lengths: NDArray[np.int64], longest: int, micro_size: int, world: int) -> Iterator[Bucket]:
    """Yield the buckets of a batch. `lengths` contains the number of predicted tokens of each sequence.

    A microbatch of shorter sequences has more rows, so that each microbatch has about `micro_size` * `longest` tokens.
    """
    edges = [math.ceil(longest / 2**halving) for halving in range(HALVINGS, -1, -1)]
    bucket_of = np.searchsorted(edges, lengths)
    for index in reversed(range(len(edges))):
        sequences = np.flatnonzero(bucket_of == index)
        if len(sequences):
            rows = micro_size * longest // edges[index]
            yield Bucket(edges[index], sequences, plan_batch(len(sequences), rows, world))
