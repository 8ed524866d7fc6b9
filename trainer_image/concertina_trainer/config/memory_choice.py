"""Fields of spec.trainer that trade speed for memory. The trainer chooses those that a job does not set.

The fields are the micro-batch size, which activations are recomputed, and whether gathered weights are freed after the
forward pass. The configuration is saved with the state, so a run keeps what was chosen in its first round (decision
"The first worker chooses what fits"). The module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from concertina_trainer.config.memory_config import Activations, Resharding
from concertina_trainer.config.trainer import TrainerConfig

MICRO_BATCH_SIZE, ACTIVATIONS, RESHARD = "microBatchSize", "memory.activations", "memory.reshardAfterForward"
"""Paths below spec.trainer of the fields that MemoryChoice has."""


@dataclasses.dataclass(frozen=True)
class MemoryChoice:
    """Values of the fields that trade speed for memory."""

    micro_batch_size: int
    activations: Activations
    reshard_after_forward: Resharding

    @staticmethod
    def parsed(fields: Mapping[str, Any]) -> MemoryChoice:
        """Parse a choice from a dict of its fields, which `dataclasses.asdict` has returned."""
        return MemoryChoice(
            int(fields["micro_batch_size"]),
            Activations(fields["activations"]),
            Resharding(fields["reshard_after_forward"]),
        )

    @staticmethod
    def of(config: TrainerConfig, frees_weights: bool) -> MemoryChoice:
        """Return the values of a configuration, with defaults for fields that the configuration does not set.

        The defaults are suitable for a device whose memory is not known. `frees_weights` says whether gathered weights
        are freed after the forward pass by default.
        """
        memory = config.memory
        return MemoryChoice(
            config.resolved_micro_batch_size,
            memory.resolved_activations,
            memory.resharding or (Resharding.always if frees_weights else Resharding.never),
        )

    def filled(self, config: TrainerConfig) -> TrainerConfig:
        """Return a copy of `config` in which this choice supplies the fields that `config` does not set."""
        memory = config.memory.model_copy(
            update={
                "activations": config.memory.activations or self.activations,
                "reshard_after_forward": config.memory.resharding or self.reshard_after_forward,
            }
        )
        rows = config.micro_batch_size or self.micro_batch_size
        return config.model_copy(update={"micro_batch_size": rows, "memory": memory})

    def chosen(self, config: TrainerConfig) -> dict[str, str]:
        """Return the values of this choice for the fields that `config` does not set, keyed by path."""
        values = {
            MICRO_BATCH_SIZE: str(self.micro_batch_size),
            ACTIVATIONS: self.activations.value,
            RESHARD: self.reshard_after_forward.value,
        }
        return {path: values[path] for path in absent(config)}

    def __str__(self) -> str:
        return (
            f"{MICRO_BATCH_SIZE} {self.micro_batch_size}, {ACTIVATIONS} {self.activations}, "
            f"{RESHARD} {self.reshard_after_forward}"
        )


def absent(config: TrainerConfig) -> tuple[str, ...]:
    """Return the paths of those fields of MemoryChoice that `config` does not set."""
    values = {
        MICRO_BATCH_SIZE: config.micro_batch_size,
        ACTIVATIONS: config.memory.activations,
        RESHARD: config.memory.resharding,
    }
    return tuple(path for path, value in values.items() if value is None)


def without(config: TrainerConfig) -> TrainerConfig:
    """Return a copy of `config` in which no field of MemoryChoice is set."""
    memory = config.memory.model_copy(update={"activations": None, "reshard_after_forward": None})
    return config.model_copy(update={"micro_batch_size": None, "memory": memory})
