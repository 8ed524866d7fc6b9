"""A job's ranks by dimension, on their nodes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

from concertina.api.spec import JobSpec
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees, Dimension
from concertina_trainer.model.flops import token_flops
from concertina_trainer.planning.description import Description


class DerivedGroup(enum.StrEnum):
    """A group that is carved out of those of other dimensions."""

    expert = "expert"


Group: TypeAlias = Dimension | DerivedGroup


@dataclasses.dataclass(frozen=True)
class OwnDescription(Description):
    """As the process that ran its code told it (concertina_trainer.planning)."""

    data: Mapping[str, Any]
    """What it was built for, as that process takes it again."""

    @property
    def of_frames(self) -> bool:
        return self.data["frames"] is not None


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    trainer: TrainerConfig
    parallelism: ParallelismConfig
    size: int
    """Ranks; a whole number of blocks."""
    per_node: int
    """Ranks of each replica, which has a node of its own or a part of one."""
    own: OwnDescription | None = None
    """Instead of the decoder."""

    @property
    def weights(self) -> int:
        return self.own.weights if self.own else self.trainer.model.weights

    @property
    def trained(self) -> int:
        """Of the weights."""
        return self.own.trained if self.own else self.trainer.model.trained_weights

    @property
    def trained_share(self) -> float:
        return self.trained / self.weights

    @property
    def flops(self) -> float:
        """Of one element, forward and backward."""
        return self.own.flops if self.own else token_flops(self.trainer.model)

    @property
    def blocks(self) -> int:
        return self.own.blocks if self.own else self.trainer.model.layers

    @property
    def elements(self) -> str:
        """What a sequence is of."""
        return "frames" if self.own and self.own.of_frames else "tokens"

    @property
    def degrees(self) -> Degrees:
        return Degrees.of(self.parallelism, self.size)

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*Dimension, *DerivedGroup)

    def degree(self, group: Group) -> int:
        return self.parallelism.expert if isinstance(group, DerivedGroup) else self.degrees.degree(group)

    def crosses(self, group: Group) -> bool:
        """Whether it has ranks on different nodes that talk to each other."""
        return self.degree(group) > 1 and self.on_node(group) < self.degree(group)

    def on_node(self, group: Group) -> int:
        """How many ranks of one group are on the same node."""
        if isinstance(group, DerivedGroup):
            shards, within = self.parallelism.expert_shards, self.parallelism.expert // self.parallelism.expert_shards
            return min(within, self.per_node) * self._near(shards, self.degrees.stride(Dimension.shard))
        return self._near(self.degree(group), self.degrees.stride(group))

    def _near(self, degree: int, stride: int) -> int:
        return max(1, min(degree, self.per_node // stride))

    def expert_place(self, rank: int) -> int:
        """Which part of the experts it has, of `parallelism.expert`."""
        place, shards = self.degrees.place(rank), self.parallelism.expert_shards
        within = self.parallelism.expert // shards
        return place.shard % shards * within + (place.context * self.degrees.tensor + place.tensor) % within

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that compute different sequences."""
        return self.size // self.parallelism.group


def of(spec: JobSpec, replicas: int, own: OwnDescription | None = None) -> ParallelLayout:
    """For a job of the bundled trainer, of a valid size."""
    assert spec.trainer is not None
    return ParallelLayout(spec.trainer, spec.parallelism, replicas * spec.workers, spec.workers, own)
