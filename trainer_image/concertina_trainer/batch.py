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
    fixed: bool = False
    """Whether the batch is cut alike in every world, and its microbatches are dealt out to the ranks in turn."""

    def parts(self, rank: int) -> list[range]:
        """The sequences of the global batch in each microbatch of this rank, which may be none. All ranks' together
        are 0 ... global_size-1."""
        if self.fixed:
            return [self._part(i * self.world + rank) for i in range(self.microbatches)]
        begin, end = (self.global_size * r // self.world for r in (rank, rank + 1))
        return [
            range(min(end, begin + i * self.rows), min(end, begin + (i + 1) * self.rows))
            for i in range(self.microbatches)
        ]

    @property
    def cuts(self) -> int:
        """Microbatches that hold something, of all ranks; with `fixed`."""
        return math.ceil(self.global_size / self.rows)

    def _part(self, index: int) -> range:
        return range(min(self.global_size, index * self.rows), min(self.global_size, (index + 1) * self.rows))

    @property
    def filling(self) -> float:
        """Part of the computed rows that is filling."""
        return 1 - self.global_size / (self.world * self.microbatches * self.rows)


def plan_batch(global_size: int, micro_size: int, world: int, fixed: bool = False) -> BatchPlan:
    """The fewest microbatches of at most `micro_size` rows, and then the fewest rows."""
    share = global_size if fixed else math.ceil(global_size / world)
    count = math.ceil(share / micro_size)
    microbatches = math.ceil(count / world) if fixed else count
    return BatchPlan(global_size, world, microbatches, math.ceil(share / count), fixed)
