"""spec.trainer.memory and .snapshot: what is kept in memory."""

from __future__ import annotations

import enum

from pydantic import Field

from concertina_trainer.config.section import Section


class SnapshotConfig(Section):
    """Snapshots: copies of the state in the memory of nodes, from which training resumes after a failure."""

    every_steps: int = Field(
        default=1,
        ge=1,
        le=1000000,
        description="Fewest steps between snapshots. Snapshots are taken after multiples of this number, "
        "and less often if overhead or the network requires it. A failure loses the steps "
        "since the last snapshot.",
    )
    overhead: float = Field(
        default=0.01,
        ge=0.0001,
        le=100.0,
        description="Share of the training time that snapshots may take. Snapshots are taken less often if "
        "they exceed it (status.snapshotInterval). Raise it to lose fewer steps in a failure.",
    )


class Activations(enum.StrEnum):
    keep = "Keep"
    products = "KeepProducts"
    recompute = "Recompute"


class Resharding(enum.StrEnum):
    auto = "Auto"
    """Value with the same effect as an absent field."""
    always = "Always"
    never = "Never"


class Offload(enum.StrEnum):
    state = "State"


class MemoryConfig(Section):
    """Settings that use less memory on devices, at the price of more computation or communication.

    The results of training do not depend on these settings.
    """

    activations: Activations | None = Field(
        default=None,
        description="Activations that are stored for the backward pass of a block. KeepProducts stores the "
        "results of matrix products and attention, and recomputes the others. Recompute stores "
        "only the block's input. Absent: the fastest that fits into the GPU's memory "
        "(docs/memory.md).",
    )
    reshard_after_forward: Resharding | None = Field(
        default=None,
        description="Whether a block's gathered weights are freed between forward and backward. Always "
        "frees them, and shards gradients after each microbatch (ZeRO-3). Never keeps weights "
        "and whole gradients (ZeRO-2). Absent or Auto: Never if that fits into the GPU's "
        "memory.",
    )
    offload: Offload | None = Field(
        default=None,
        description="Data that are kept in host memory instead of device memory. State: weights, reduced "
        "gradients and optimizer moments. CPUs then update the weights, and copy them to the "
        "device when they are gathered. Absent: nothing is offloaded.",
    )

    @property
    def resharding(self) -> Resharding | None:
        """When blocks free their gathered weights (Always or Never), or None if the trainer chooses."""
        return None if self.reshard_after_forward is Resharding.auto else self.reshard_after_forward

    @property
    def resolved_activations(self) -> Activations:
        return self.activations or Activations.keep
