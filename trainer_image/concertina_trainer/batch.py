"""How one global batch is cut into microbatches: a pure function of its size and the world's."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """Every rank runs `microbatches` of `rows` sequences each; what doesn't divide is filled with zero-weight rows."""

    global_size: int
    world: int
    microbatches: int
    rows: int

    def slice_of(self, rank: int) -> range:
        """The sequences of the global batch that this rank computes; all ranks' in order are 0 ... global_size-1."""
        return range(self.global_size * rank // self.world, self.global_size * (rank + 1) // self.world)

    @property
    def filling(self) -> float:
        """Part of the computed rows that is filling."""
        return 1 - self.global_size / (self.world * self.microbatches * self.rows)


def plan_batch(global_size: int, micro_size: int, world: int) -> BatchPlan:
    """The fewest microbatches of at most `micro_size` rows, and then the fewest rows."""
    share = math.ceil(global_size / world)
    microbatches = math.ceil(share / micro_size)
    return BatchPlan(global_size, world, microbatches, math.ceil(share / microbatches))
