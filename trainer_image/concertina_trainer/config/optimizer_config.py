"""spec.trainer.optimizer: AdamW and the schedule of its learning rate."""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar

from pydantic import Field

from concertina_trainer.config.section import Section, SectionRule


class Schedule(enum.StrEnum):
    """How the learning rate changes after the warm-up."""

    cosine = "Cosine"
    linear = "Linear"
    constant = "Constant"
    warmup_stable_decay = "WarmupStableDecay"
    """Constant, then a decay at the end of the run (Hägele et al. 2024, arXiv 2405.18392)."""


class OptimizerConfig(Section):
    """AdamW, with a linear warm-up of the learning rate and a schedule for the steps after the warm-up.

    At the last step the rate is minLearningRateFactor times learningRate, except with the schedule Constant.
    """

    RULES: ClassVar = (
        SectionRule(
            "decaySteps",
            "!has(self.decaySteps) || self.schedule == 'WarmupStableDecay'",
            lambda optimizer: optimizer.decay_steps is None or optimizer.schedule is Schedule.warmup_stable_decay,
            "optimizer.decaySteps needs optimizer.schedule: WarmupStableDecay",
        ),
    )

    learning_rate: float = Field(
        default=3e-4, ge=0.0, le=10.0, description="Highest learning rate, reached after the warm-up."
    )
    schedule: Schedule = Field(
        default=Schedule.cosine,
        description="Learning rate after the warm-up. Cosine and Linear decrease it until the last step. "
        "Constant keeps learningRate. WarmupStableDecay keeps it until the last decaySteps, "
        "and then decreases it with the square root of the decay steps.",
    )
    min_learning_rate_factor: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Learning rate at the last step, as a fraction of learningRate. Constant ignores it.",
    )
    decay_steps: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Number of decay steps of WarmupStableDecay. Absent: a fifth of all steps.",
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        le=1000000000,
        description="Number of steps in which the learning rate rises from 0. Absent: a tenth of all "
        "steps, but at most 100.",
    )
    weight_decay: float = Field(
        default=0.1, ge=0.0, le=10.0, description="Decoupled weight decay of matrices. Norms have no weight decay."
    )
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.95],
        description="Decay rates of AdamW's averages of the gradient (first) and of its square (second).",
    )
    epsilon: float = Field(
        default=1e-8, ge=1e-16, le=1.0, description="Epsilon that AdamW adds to the square root of the second moment."
    )
    max_grad_norm: float = Field(
        default=1.0,
        ge=0.0,
        le=1e9,
        description="Largest norm of the gradient. A gradient with a larger norm is scaled down to it. 0 "
        "means no limit.",
    )

    @property
    def min_learning_rate(self) -> float:
        return self.min_learning_rate_factor * self.learning_rate

    def resolved_warmup_steps(self, steps: int) -> int:
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def resolved_decay_steps(self, steps: int) -> int:
        return max(1, steps // 5) if self.decay_steps is None else self.decay_steps
