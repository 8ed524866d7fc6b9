"""Position of each rank in the dimensions of parallelism.

The operator imports this module, so it does not import torch. Ranks are numbered along the dimensions in the order of
`Dimension`, and the last dimension (tensor) varies fastest. The ranks of a tensor group, which communicate the most,
therefore have consecutive numbers. The ranks of a block (the smallest number of ranks that can train) are consecutive
too, so that blocks can be added and removed at the end (decision "The order of ranks").
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from concertina_state.errors import InvalidInput
from concertina_trainer.config.parallelism import ParallelismConfig


class Dimension(enum.StrEnum):
    """Dimension of parallelism, in order from the slowest to the fastest varying with the rank."""

    replicate = "replicate"
    shard = "shard"
    pipeline = "pipeline"
    context = "context"
    tensor = "tensor"


class Degrees(NamedTuple):
    """Number of ranks in each dimension, or a rank's position in each dimension."""

    replicate: int = 1
    """Number of ranks that have copies of the same weights and optimizer state."""
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @staticmethod
    def of(parallelism: ParallelismConfig, world: int) -> Degrees:
        """Return the number of ranks in each dimension, for `world` ranks in total.

        Raises:
            InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`).
        """
        if world % parallelism.block:
            raise InvalidInput(
                f"{world} workers are not a multiple of the block of {parallelism.block} workers that "
                f"spec.parallelism needs: use {max(1, world // parallelism.block) * parallelism.block} "
                "workers."
            )
        data = world // parallelism.group
        shard = parallelism.shard or data
        return Degrees(data // shard, shard, parallelism.pipeline, parallelism.context, parallelism.tensor)

    def __str__(self) -> str:
        return (
            " x ".join(f"{dimension} {self.degree(dimension)}" for dimension in Dimension if self.degree(dimension) > 1)
            or "one rank"
        )

    @property
    def data(self) -> int:
        """Number of parts into which a global batch is divided.

        Each part is computed by one rank, or by the ranks of a group together (see `group`).
        """
        return self.replicate * self.shard

    @property
    def group(self) -> int:
        """Number of ranks that compute the same sequences."""
        return self.pipeline * self.context * self.tensor

    def degree(self, dimension: Dimension) -> int:
        return self[list(Dimension).index(dimension)]

    def stride(self, dimension: Dimension) -> int:
        """Return the difference between the ranks of two neighbors in this dimension."""
        return math.prod(self[list(Dimension).index(dimension) + 1 :])

    def place(self, rank: int) -> Degrees:
        """Return a rank's position in each dimension."""
        return Degrees(*(rank // self.stride(dimension) % self.degree(dimension) for dimension in Dimension))
