"""spec.trainer.optimizer: the optimizer, its parameter groups, and the schedule of its learning rate."""

from __future__ import annotations

import enum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from concertina_trainer.config.optimizer_kinds import (
    HYPERPARAMETERS,
    OPTIMIZERS,
    OptimizerKind,
    OptimizerName,
    with_hyperparameter,
)
from concertina_trainer.config.section import Section, SectionRule

MOST_AVERAGING = 0.984
"""Largest averaging factor of a moment in bfloat16, rounded down.

bfloat16 has 8 significant bits, so rounding to the nearest number drops changes of less than 2^-8 of the moment. A
moment m with the factor b and the new value x changes by (1 - b)(x - m). The moment therefore stops changing while its
relative error is still up to 2^-8 / (1 - b). With b at most 1 - 2^-6, the relative error of a second moment is at most
a quarter, which changes the step by an eighth. Without a limit on b, the error is not bounded: a second moment with b =
0.999 never decreases.
"""


class Schedule(enum.StrEnum):
    """How the learning rate changes after the warm-up."""

    cosine = "Cosine"
    linear = "Linear"
    constant = "Constant"
    warmup_stable_decay = "WarmupStableDecay"
    """Constant, then a decay at the end of the run (Hägele et al. 2024, arXiv 2405.18392)."""


class StatePrecision(enum.StrEnum):
    float32 = "Float32"
    bfloat16 = "BFloat16"


class ParameterGroup(Section):
    """Parameters, selected by patterns on their names, with optimizer settings of their own."""

    names: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=64)] = (
        Field(
            description="Patterns of parameters' names, as in a shell: * stands for any characters. An example is "
            "blocks.*.attention.*. Each pattern must match a parameter that is trained."
        )
    )
    weight_decay: float | None = Field(
        default=None, ge=0.0, le=10.0, description="Weight decay of these parameters. Absent: as without the group."
    )
    learning_rate_factor: float = Field(
        default=1.0, ge=0.0, le=1000.0, description="Factor of the learning rate of these parameters."
    )


def _hyperparameter_rule(name: str) -> SectionRule:
    """Return the rule that a job may set the hyperparameter `name` only if the job's optimizer has it."""
    names = with_hyperparameter(name)
    return SectionRule(
        name,
        f"!has(self.{name}) || self.name in {names}",
        lambda optimizer: getattr(optimizer, name) is None or name in optimizer.kind.defaults,
        f"optimizer.{name} applies to {', '.join(names)}: remove it, or set optimizer.name to one of these",
    )


def _averages_slowly(optimizer: OptimizerConfig) -> bool:
    """Return whether bfloat16 can't represent the change in one step of some moment of the optimizer."""
    values = [optimizer.hyperparameters[name] for name in optimizer.kind.averages]
    factors = [factor for value in values for factor in (value if isinstance(value, list) else [value])]
    return optimizer.name is OptimizerName.adagrad or max(factors) > MOST_AVERAGING


class OptimizerConfig(Section):
    """The optimizer, with a linear warm-up of the learning rate and a schedule for the steps after the warm-up.

    At the last step the rate is minLearningRateFactor times learningRate, except with the schedule Constant.
    """

    RULES: ClassVar = (
        SectionRule(
            "decaySteps",
            "!has(self.decaySteps) || self.schedule == 'WarmupStableDecay'",
            lambda optimizer: optimizer.decay_steps is None or optimizer.schedule is Schedule.warmup_stable_decay,
            "optimizer.decaySteps needs optimizer.schedule: WarmupStableDecay",
        ),
        *map(_hyperparameter_rule, HYPERPARAMETERS),
        SectionRule(
            "nesterov",
            "!has(self.nesterov) || !self.nesterov || !has(self.momentum) || self.momentum > 0.0",
            lambda optimizer: not optimizer.nesterov or optimizer.momentum is None or optimizer.momentum > 0,
            "optimizer.nesterov needs momentum: raise optimizer.momentum, or remove nesterov",
        ),
        SectionRule(
            "momentsPrecision",
            "self.momentsPrecision != 'BFloat16' || self.name != 'Adagrad' && "
            f"(!has(self.betas) || self.betas.all(beta, beta <= {MOST_AVERAGING})) && "
            f"(!has(self.momentum) || self.momentum <= {MOST_AVERAGING}) && "
            f"(self.name != 'RMSprop' || has(self.alpha) && self.alpha <= {MOST_AVERAGING})",
            lambda optimizer: optimizer.moments_precision is StatePrecision.float32 or not _averages_slowly(optimizer),
            f"optimizer.momentsPrecision BFloat16 needs betas, momentum and alpha of at most {MOST_AVERAGING}, and not "
            "Adagrad, whose moment would stop growing: lower them, or set momentsPrecision to Float32",
        ),
    )

    name: OptimizerName = Field(
        default=OptimizerName.adamw,
        description="Class of torch.optim. Muon updates the matrices of blocks, and AdamW the other parameters. A "
        "saved state of one optimizer can't be continued with another.",
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
    weight_decay: float | None = Field(
        default=None,
        ge=0.0,
        le=10.0,
        description="Decay of matrices. Embeddings, norms and biases have none, unless groups says otherwise. AdamW, "
        "NAdam, RAdam and Muon decay the weights themselves, and the others add the decay to the gradient. Absent: 0.1 "
        "with AdamW, NAdam, RAdam and Muon, else 0.",
    )
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="Averaging factors of the gradient and its square, for AdamW, Adam, NAdam and RAdam, and for the "
        "AdamW beside Muon. Absent: 0.9 and 0.95.",
    )
    epsilon: float | None = Field(
        default=None,
        ge=1e-16,
        le=1.0,
        description="Added to the root of the second moment, for all but SGD. Absent: 1e-8, and 1e-10 with Adagrad.",
    )
    momentum: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="Momentum of SGD, RMSprop and Muon. Absent: 0.9 with SGD, 0 with RMSprop, 0.95 with Muon.",
    )
    nesterov: bool | None = Field(
        default=None, description="Nesterov's momentum, for SGD and Muon. Absent: false with SGD, true with Muon."
    )
    alpha: float | None = Field(
        default=None, ge=0.0, lt=1.0, description="Averaging factor of the gradient's square in RMSprop. Absent: 0.99."
    )
    groups: Annotated[list[ParameterGroup], Field(max_length=32)] = Field(
        default=[],
        description="Parameters with settings of their own, by patterns of their names. A parameter belongs to the "
        "first group that matches its name.",
    )
    moments_precision: StatePrecision = Field(
        default=StatePrecision.float32,
        description="Precision in which moments are kept between steps. BFloat16 halves their memory and their part of "
        "a snapshot, and rounds each moment once a step. A saved state can't be continued with the other precision.",
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="Keeps an exponential moving average of the trained weights, with this decay in each step. It "
        "begins with a smaller decay, so that the first weights do not count long. It is saved with the state. "
        "Absent: there is none.",
    )
    max_grad_norm: float = Field(
        default=1.0,
        ge=0.0,
        le=1e9,
        description="Largest norm of the gradient. A gradient with a larger norm is scaled down to it. 0 "
        "means no limit.",
    )

    @property
    def kind(self) -> OptimizerKind:
        return OPTIMIZERS[self.name]

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Hyperparameters of this optimizer, with defaults in place of absent ones."""
        given = {name: getattr(self, name) for name in self.kind.defaults}
        return {name: self.kind.defaults[name] if value is None else value for name, value in given.items()}

    @property
    def resolved_weight_decay(self) -> float:
        return (0.1 if self.kind.decoupled else 0.0) if self.weight_decay is None else self.weight_decay

    def moments(self, of_matrix: bool) -> list[str]:
        """Return the names of the moments that the optimizer keeps for each element of a trained parameter.

        `of_matrix` says whether the parameter is a matrix of a block (`model.optimizer.is_matrix`).
        """
        if of_matrix and self.kind.others:
            return list(self.kind.of_matrices)
        values = self.hyperparameters
        return [name for name, needs in self.kind.moments.items() if needs is None or values[needs]]

    def state_bytes(self, trained: int, of_matrices: int) -> int:
        """Return the total size in bytes of all moments, and of the average of the weights if there is one.

        `trained` is the number of trained weights. `of_matrices` is how many of these are elements of matrices of
        blocks.
        """
        moments = of_matrices * len(self.moments(True)) + (trained - of_matrices) * len(self.moments(False))
        of_moments = moments * (2 if self.moments_precision is StatePrecision.bfloat16 else 4)
        return of_moments + (0 if self.ema_decay is None else 4 * trained)

    def resolved_ema_decay(self, step: int) -> float:
        """Return the decay of the average of the weights in the update after `step` steps.

        The decay is (1 + step) / (10 + step), but at most the field emaDecay.
        """
        return min(self.ema_decay or 0.0, (1 + step) / (10 + step))

    @property
    def min_learning_rate(self) -> float:
        return self.min_learning_rate_factor * self.learning_rate

    def resolved_warmup_steps(self, steps: int) -> int:
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def resolved_decay_steps(self, steps: int) -> int:
        return max(1, steps // 5) if self.decay_steps is None else self.decay_steps
