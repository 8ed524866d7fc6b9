"""A job's ranks by dimension, on their nodes."""

from __future__ import annotations

import dataclasses
import enum
import math

from concertina.api.spec import JobSpec
from concertina_trainer.config import ParallelismConfig, TrainerConfig


class Dimension(enum.StrEnum):
    """From the outermost on: ranks of the last one are neighbours."""

    replicate = "replicate"
    shard = "shard"
    pipeline = "pipeline"
    context = "context"
    tensor = "tensor"


@dataclasses.dataclass(frozen=True)
class Layout:
    trainer: TrainerConfig
    parallelism: ParallelismConfig
    size: int
    """Ranks; a whole number of blocks."""
    per_node: int
    """Ranks of each replica, which has a node of its own or a part of one."""

    @property
    def degrees(self) -> dict[Dimension, int]:
        given = self.parallelism
        data = self.size // given.group
        shard = given.shard or data
        return dict(
            zip(Dimension, (data // shard, shard, given.pipeline, given.context, given.tensor), strict=True)
        )  # fmt: skip

    def degree(self, dimension: Dimension) -> int:
        return self.degrees[dimension]

    def stride(self, dimension: Dimension) -> int:
        """How far neighbours of this dimension are from each other."""
        degrees = list(self.degrees.values())
        return math.prod(degrees[list(Dimension).index(dimension) + 1 :])

    def place(self, rank: int) -> dict[Dimension, int]:
        return {each: rank // self.stride(each) % degree for each, degree in self.degrees.items()}

    def crosses(self, dimension: Dimension) -> bool:
        """Whether it has ranks on different nodes that talk to each other."""
        degree = self.degree(dimension)
        return degree > 1 and self.stride(dimension) * degree > self.per_node

    def on_node(self, dimension: Dimension) -> int:
        """How many ranks of one group are on the same node."""
        return max(1, min(self.degree(dimension), self.per_node // self.stride(dimension)))

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that compute different sequences."""
        return self.size // self.parallelism.group


def of(spec: JobSpec, replicas: int) -> Layout:
    """For a job of the bundled trainer, of a valid size."""
    assert spec.trainer is not None
    return Layout(spec.trainer, spec.parallelism, replicas * spec.workers, spec.workers)
