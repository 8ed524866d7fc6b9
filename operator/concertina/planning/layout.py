"""Layout of a job: how its ranks are divided into groups by dimension, and which ranks share a node."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

from concertina.api.spec import JobSpec
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees, Dimension
from concertina_trainer.model.flops import recomputed_flops, token_flops
from concertina_trainer.planning.description import Description


class DerivedGroup(enum.StrEnum):
    """Group of ranks that is not a dimension of the layout, such as the ranks that share the experts of a model.

    The ranks of such a group come from groups of several dimensions.
    """

    expert = "expert"


Group: TypeAlias = Dimension | DerivedGroup


@dataclasses.dataclass(frozen=True)
class OwnDescription(Description):
    """Description of a custom model. concertina_trainer.planning produces it by running the model's code."""

    data: Mapping[str, Any]
    """Data configuration with which concertina_trainer.planning built the model, in the form of its input."""

    @property
    def of_frames(self) -> bool:
        return any(field["width"] for field in self.data["fields"])


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    trainer: TrainerConfig
    parallelism: ParallelismConfig
    size: int
    """Number of ranks. It is a multiple of the size of a parallel group."""
    per_node: int
    """Number of ranks of each replica. Each node is assumed to run at most one replica of the job."""
    own: OwnDescription | None = None
    """Description of a custom model. If it is set, the model in `trainer` is ignored."""

    @property
    def weights(self) -> int:
        return self.own.weights if self.own else self.trainer.model.weights

    @property
    def trained(self) -> int:
        """Number of the model's weights that are trained. Frozen weights are not included."""
        return self.own.trained if self.own else self.trainer.model.trained_weights

    @property
    def trained_share(self) -> float:
        return self.trained / self.weights

    @property
    def matrices(self) -> int:
        """Number of trained weights that Muon updates: the elements of the blocks' matrices."""
        return self.own.matrices if self.own else self.trainer.model.matrix_weights

    @property
    def moment_bytes(self) -> float:
        """Bytes that the optimizer stores for each trained weight, on average over the model."""
        return self.trainer.optimizer.state_bytes(self.trained, self.matrices) / self.trained

    @property
    def flops(self) -> float:
        """Floating-point operations of the model for one element of a sequence, forward and backward."""
        return self.own.flops if self.own else token_flops(self.trainer.model)

    @property
    def recomputed_flops(self) -> float | None:
        """Operations for one element that activation checkpointing repeats; None if unknown (custom models)."""
        activations = self.trainer.memory.resolved_activations
        if self.own is None:
            return recomputed_flops(self.trainer.model, activations)
        return 0.0 if activations is Activations.keep else None

    @property
    def blocks(self) -> int:
        return self.own.blocks if self.own else self.trainer.model.layers

    @property
    def elements(self) -> str:
        """Name for the elements of a sequence: "frames" (one vector per position) or "tokens"."""
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
        """Return whether the ranks of one group are on several nodes, so that they communicate over the network."""
        return self.degree(group) > 1 and self.on_node(group) < self.degree(group)

    def on_node(self, group: Group) -> int:
        """Return the number of ranks of one group that are on the same node."""
        if isinstance(group, DerivedGroup):
            shards, within = self.parallelism.expert_shards, self.parallelism.expert // self.parallelism.expert_shards
            return min(within, self.per_node) * self._near(shards, self.degrees.stride(Dimension.shard))
        return self._near(self.degree(group), self.degrees.stride(group))

    def _near(self, degree: int, stride: int) -> int:
        return max(1, min(degree, self.per_node // stride))

    def expert_place(self, rank: int) -> int:
        """Return the index, from 0, of the subset of a model's experts that a rank computes.

        Expert parallelism divides the experts of a mixture of experts into `parallelism.expert` subsets.
        """
        place, shards = self.degrees.place(rank), self.parallelism.expert_shards
        within = self.parallelism.expert // shards
        return place.shard % shards * within + (place.context * self.degrees.tensor + place.tensor) % within

    @property
    def data(self) -> int:
        """Number of data-parallel groups of the layout. Each group computes different sequences."""
        return self.size // self.parallelism.group


def of(spec: JobSpec, replicas: int, own: OwnDescription | None = None) -> ParallelLayout:
    """Return the layout of a job of the bundled trainer for a valid number of replicas."""
    assert spec.trainer is not None
    return ParallelLayout(spec.trainer, spec.parallelism, replicas * spec.workers, spec.workers, own)
