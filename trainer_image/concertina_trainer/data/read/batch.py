"""Division of a global batch into microbatches: a pure function of its size and the world's, or of shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees


@dataclass(frozen=True)
class BatchPlan:
    """Plan of a batch: every rank runs `microbatches` of `rows` rows each.

    A row is a sequence or, if the batch does not divide evenly, padding without weight. With `shares`, the size of each
    rank's microbatches depends on its share.
    """

    global_size: int
    world: int
    microbatches: int
    rows: int
    """Rows of a microbatch; with `shares`, the maximum."""
    fixed: bool = False
    """Whether the batch is cut alike in every world, and its microbatches are assigned to the ranks in turn."""
    shares: tuple[int, ...] = ()
    """Sequences of each rank; empty if they are equal."""

    def slices(self, rank: int) -> list[range]:
        """Return the sequences of the global batch in each microbatch of this rank, which may be none.

        Those of all ranks together are 0 ... global_size-1.
        """
        if self.fixed:
            return [self._slice(i * self.world + rank) for i in range(self.microbatches)]
        if self.shares:
            begin, share, count = sum(self.shares[:rank]), self.shares[rank], self.microbatches
            edges = [begin + share * i // count for i in range(count + 1)]
            return [range(edges[i], edges[i + 1]) for i in range(count)]
        begin, end = (self.global_size * r // self.world for r in (rank, rank + 1))
        return [
            range(min(end, begin + i * self.rows), min(end, begin + (i + 1) * self.rows))
            for i in range(self.microbatches)
        ]

    def rows_for(self, count: int) -> int:
        """Return the rows of a microbatch with `count` sequences: at least one, as its collectives need an input."""
        return max(1, count) if self.shares else self.rows

    def shared_out(self, shares: Sequence[int], micro_size: int) -> BatchPlan:
        """Return the plan of the same batch by other shares.

        Every rank has as many microbatches as the largest share needs.
        """
        count = max(1, math.ceil(max(shares) / micro_size))
        return dataclasses.replace(
            self, microbatches=count, rows=math.ceil(max(shares) / count), shares=tuple(shares), fixed=False
        )

    @property
    def cuts(self) -> int:
        """Number of microbatches of all ranks that hold sequences; with `fixed`."""
        return math.ceil(self.global_size / self.rows)

    def _slice(self, index: int) -> range:
        return range(min(self.global_size, index * self.rows), min(self.global_size, (index + 1) * self.rows))

    @property
    def filling(self) -> float:
        """Fraction of the computed rows that is padding; without `shares`."""
        return 1 - self.global_size / (self.world * self.microbatches * self.rows)


def plan_batch(global_size: int, micro_size: int, world: int, fixed: bool = False, multiple: int = 1) -> BatchPlan:
    """Plan the fewest microbatches of at most `micro_size` rows, and then the fewest rows.

    The number of microbatches is a multiple of `multiple`, as a pipeline's stages need it; not with `fixed`.
    """
    share = global_size if fixed else math.ceil(global_size / world)
    count = math.ceil(math.ceil(share / micro_size) / multiple) * multiple
    microbatches = math.ceil(count / world) if fixed else count
    return BatchPlan(global_size, world, microbatches, math.ceil(share / count), fixed)


def batch_plan(config: TrainerConfig, degrees: Degrees) -> BatchPlan:
    """Return the plan of a run in a world of these degrees."""
    return plan_batch(
        config.global_batch_size,
        config.resolved_micro_batch_size,
        degrees.data,
        config.bitwise,
        multiple=degrees.pipeline,
    )
