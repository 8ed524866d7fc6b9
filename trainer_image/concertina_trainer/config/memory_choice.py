"""Fields of spec.trainer that trade speed for memory, and that are chosen for a job that does not set them. No torch.

A state carries the configuration that it was trained with, so a run keeps what was chosen for its first round (decision
"The first worker chooses what fits").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from concertina_trainer.config.memory_config import Activations, Resharding
from concertina_trainer.config.trainer import TrainerConfig

MICRO_BATCH_SIZE, ACTIVATIONS, RESHARD = "microBatchSize", "memory.activations", "memory.reshardAfterForward"
"""Paths of the fields below spec.trainer."""


@dataclasses.dataclass(frozen=True)
class MemoryChoice:
    """Value of each of the fields."""

    micro_batch_size: int
    activations: Activations
    reshard_after_forward: Resharding

    @staticmethod
    def parsed(fields: Mapping[str, Any]) -> MemoryChoice:
        """Return a choice in the form of dataclasses.asdict."""
        return MemoryChoice(
            int(fields["micro_batch_size"]),
            Activations(fields["activations"]),
            Resharding(fields["reshard_after_forward"]),
        )

    @staticmethod
    def of(config: TrainerConfig, frees_weights: bool) -> MemoryChoice:
        """Return the values that a configuration has, with those of a device whose memory is not known.

        `frees_weights` says whether such a device frees gathered weights.
        """
        memory = config.memory
        return MemoryChoice(
            config.resolved_micro_batch_size,
            memory.resolved_activations,
            memory.resharding or (Resharding.always if frees_weights else Resharding.never),
        )

    def filled(self, config: TrainerConfig) -> TrainerConfig:
        """Return the configuration with these values in the fields that are absent."""
        memory = config.memory.model_copy(
            update={
                "activations": config.memory.activations or self.activations,
                "reshard_after_forward": config.memory.resharding or self.reshard_after_forward,
            }
        )
        rows = config.micro_batch_size or self.micro_batch_size
        return config.model_copy(update={"micro_batch_size": rows, "memory": memory})

    def chosen(self, config: TrainerConfig) -> dict[str, str]:
        """Return the values of the fields that are absent in the configuration, by path."""
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
    """Return the paths of the fields that the configuration does not set."""
    values = {
        MICRO_BATCH_SIZE: config.micro_batch_size,
        ACTIVATIONS: config.memory.activations,
        RESHARD: config.memory.resharding,
    }
    return tuple(path for path, value in values.items() if value is None)


def without(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration without the fields."""
    memory = config.memory.model_copy(update={"activations": None, "reshard_after_forward": None})
    return config.model_copy(update={"micro_batch_size": None, "memory": memory})
