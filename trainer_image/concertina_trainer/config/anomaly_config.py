"""spec.trainer.anomalies: the response to steps that look wrong."""

from __future__ import annotations

import enum
from typing import Literal

from pydantic import Field

from concertina_trainer.config.section import Section


class AnomalyResponse(enum.StrEnum):
    ignore = "Ignore"
    skip = "Skip"
    roll_back = "RollBack"
    stop = "Stop"


class AnomalyConfig(Section):
    """Response to a step that looks wrong.

    Skip leaves out the batch of the step. RollBack goes back to a durable checkpoint, and leaves out all batches after
    it. With both, the saved state records which samples were left out.
    """

    non_finite: Literal[AnomalyResponse.skip, AnomalyResponse.roll_back, AnomalyResponse.stop] = Field(
        default=AnomalyResponse.stop,
        description="Response when the loss or the gradient is not finite. Skip leaves the batch out. RollBack "
        "returns to a checkpoint and leaves out all batches since. Stop repeats the step once and then fails the job.",
    )
    spike: AnomalyResponse = Field(
        default=AnomalyResponse.ignore,
        description="Response when the loss jumps: Ignore, Skip and RollBack as in nonFinite, or Stop, which "
        "fails the job.",
    )
    spike_deviations: float = Field(
        default=8.0,
        ge=2.0,
        le=1000.0,
        description="A loss is a jump if it exceeds the mean of the previous losses by more than this many "
        "standard deviations. Raise it for a noisy loss.",
    )
    rollback_steps: int = Field(
        default=100,
        ge=1,
        le=1000000,
        description="Least number of steps that RollBack undoes before the step that looks wrong.",
    )

    corruption_check_steps: int = Field(
        default=100,
        ge=0,
        le=1000000,
        description="Steps between checks that all workers hold the same weights. If the weights differ, "
        "training goes back to the last check that passed. 0 turns the checks off.",
    )

    @property
    def reaches(self) -> tuple[int, ...]:
        """Largest numbers of steps that rollbacks can undo: one number for silent corruption, one for a bad loss.

        For each number, the job keeps a checkpoint to which a rollback of that many steps can return.
        """
        rolls_back = AnomalyResponse.roll_back in (self.non_finite, self.spike)
        return tuple(filter(None, (self.corruption_check_steps, self.rollback_steps if rolls_back else 0)))
