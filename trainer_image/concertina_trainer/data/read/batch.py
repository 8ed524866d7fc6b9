"""Division of a global batch among ranks and into microbatches.

The division depends only on the batch size and the number of ranks, or on the shares of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees


@dataclass(frozen=True)
class BatchPlan:
    """Division of a global batch. Every rank runs `microbatches` microbatches of `rows` rows each.

    A row is a sequence. If the batch does not divide evenly, some rows are padding, which has no weight. If `shares` is
    set, the number of rows in the microbatches of a rank depends on the rank's share.
    """

    global_size: int
    world: int
    microbatches: int
    rows: int
    """Number of rows of a microbatch. If `shares` is set, this is the maximum."""
    fixed: bool = False
    """True if the batch has the same microbatches for any number of ranks.

    In this case, the microbatches are assigned to the ranks in turn.
    """
    shares: tuple[int, ...] = ()
    """Number of sequences of each rank in a batch, or empty if all ranks have the same number."""

    def slices(self, rank: int) -> list[range]:
        """Return the sequences of each microbatch of a rank, as ranges of indices in the global batch.

        A range may be empty. The ranges of all ranks together cover the whole batch.
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
        """Return the number of rows of a microbatch with `count` sequences.

        A microbatch has at least one row, even without sequences, because all ranks take part in its collectives.
        """
        return max(1, count) if self.shares else self.rows

    def shared_out(self, shares: Sequence[int], micro_size: int) -> BatchPlan:
        """Return a plan that divides the same batch among the ranks in proportion to `shares`.

        All ranks have the same number of microbatches, which is the number that the largest share needs.
        """
        count = max(1, math.ceil(max(shares) / micro_size))
        return dataclasses.replace(
            self, microbatches=count, rows=math.ceil(max(shares) / count), shares=tuple(shares), fixed=False
        )

    @property
    def cuts(self) -> int:
        """Number of microbatches, over all ranks, that contain at least one sequence.

        Use this property only if `fixed` is set, so that the batch has the same microbatches for any number of ranks.
        """
        return math.ceil(self.global_size / self.rows)

    def _slice(self, index: int) -> range:
        return range(min(self.global_size, index * self.rows), min(self.global_size, (index + 1) * self.rows))

    @property
    def filling(self) -> float:
        """Fraction of all rows that are padding. This property is only valid for plans without `shares`."""
        return 1 - self.global_size / (self.world * self.microbatches * self.rows)


def plan_batch(global_size: int, micro_size: int, world: int, fixed: bool = False, multiple: int = 1) -> BatchPlan:
    """Return the plan with the fewest microbatches of at most `micro_size` rows each.

    Among several such plans, the result is the one with the fewest rows.

    Without `fixed`, the number of microbatches is a multiple of `multiple`, which a pipeline's stages require.
    """
    share = global_size if fixed else math.ceil(global_size / world)
    count = math.ceil(math.ceil(share / micro_size) / multiple) * multiple
    microbatches = math.ceil(count / world) if fixed else count
    return BatchPlan(global_size, world, microbatches, math.ceil(share / count), fixed)


def batch_plan(config: TrainerConfig, degrees: Degrees) -> BatchPlan:
    """Return the plan for the batches of a run with these degrees of parallelism."""
    return plan_batch(
        config.global_batch_size,
        config.resolved_micro_batch_size,
        degrees.data,
        config.bitwise,
        multiple=degrees.pipeline,
    )
