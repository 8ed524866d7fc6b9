"""A job's ranks by dimension, on their nodes."""

from __future__ import annotations

import dataclasses

from concertina.api.spec import JobSpec
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees, Dimension


@dataclasses.dataclass(frozen=True)
class Layout:
    trainer: TrainerConfig
    parallelism: ParallelismConfig
    size: int
    """Ranks; a whole number of blocks."""
    per_node: int
    """Ranks of each replica, which has a node of its own or a part of one."""

    @property
    def degrees(self) -> Degrees:
        return Degrees.of(self.parallelism, self.size)

    def degree(self, dimension: Dimension) -> int:
        return self.degrees.degree(dimension)

    def crosses(self, dimension: Dimension) -> bool:
        """Whether it has ranks on different nodes that talk to each other."""
        degree = self.degree(dimension)
        return degree > 1 and self.degrees.stride(dimension) * degree > self.per_node

    def on_node(self, dimension: Dimension) -> int:
        """How many ranks of one group are on the same node."""
        return max(1, min(self.degree(dimension), self.per_node // self.degrees.stride(dimension)))

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that compute different sequences."""
        return self.size // self.parallelism.group


def of(spec: JobSpec, replicas: int) -> Layout:
    """For a job of the bundled trainer, of a valid size."""
    assert spec.trainer is not None
    return Layout(spec.trainer, spec.parallelism, replicas * spec.workers, spec.workers)
