"""Where each rank of a world stands in the dimensions of parallelism. No torch here: the operator imports this.

Ranks lie in the order of `Dimension`, the last one innermost: those of a tensor group are neighbours, since they
talk the most, and those of a block are too, so that a world grows and shrinks at its end (decision "The order of
ranks")."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from concertina_state.errors import InvalidInput
from concertina_trainer.config.parallelism import ParallelismConfig


class Dimension(enum.StrEnum):
    """From the outermost on: ranks of the last one are neighbours."""

    replicate = "replicate"
    shard = "shard"
    pipeline = "pipeline"
    context = "context"
    tensor = "tensor"


class Degrees(NamedTuple):
    """How many ranks each dimension has; or a rank's place in each."""

    replicate: int = 1
    """Copies of weights and optimizer state."""
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @staticmethod
    def of(parallelism: ParallelismConfig, world: int) -> Degrees:
        """Raises InvalidInput."""
        if world % parallelism.block:
            raise InvalidInput(
                f"{world} workers are no whole number of blocks of {parallelism.block}, which spec.parallelism asks "
                f"for: use {max(1, world // parallelism.block) * parallelism.block} workers."
            )
        data = world // parallelism.group
        shard = parallelism.shard or data
        return Degrees(data // shard, shard, parallelism.pipeline, parallelism.context, parallelism.tensor)

    def __str__(self) -> str:
        return " x ".join(f"{each} {self.degree(each)}" for each in Dimension if self.degree(each) > 1) or "one rank"

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that compute different sequences."""
        return self.replicate * self.shard

    @property
    def group(self) -> int:
        """Ranks that compute the same sequences."""
        return self.pipeline * self.context * self.tensor

    def degree(self, dimension: Dimension) -> int:
        return self[list(Dimension).index(dimension)]

    def stride(self, dimension: Dimension) -> int:
        """How far neighbours of this dimension are from each other."""
        return math.prod(self[list(Dimension).index(dimension) + 1 :])

    def place(self, rank: int) -> Degrees:
        return Degrees(*(rank // self.stride(each) % self.degree(each) for each in Dimension))
