"""Rotary positions of spec.trainer.model."""

from __future__ import annotations

import enum

from pydantic import Field

from concertina_trainer.config.section import Section, SectionRule


class RotaryPairs(enum.StrEnum):
    halves = "Halves"
    adjacent = "Adjacent"


class RopeScalingType(enum.StrEnum):
    llama3 = "Llama3"
    linear = "Linear"
    yarn = "Yarn"


class RopeScalingConfig(Section):
    """Scaling of the rotary position frequencies, which lets a model process longer sequences."""

    type: RopeScalingType = Field(
        description="Scaling of the rotary position frequencies. Llama3 divides low frequencies by factor. "
        "Linear divides all frequencies. Yarn (arXiv 2309.00071) divides low frequencies, and "
        "scales queries and keys."
    )
    factor: float = Field(ge=1.0, le=65536.0, description="Divisor of the frequencies.")
    original_length: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Length of the sequences that the model was first trained on, in tokens. Required for "
        "Llama3 and Yarn.",
    )
    low_frequency_factor: float = Field(
        default=1.0,
        gt=0.0,
        le=65536.0,
        description="For Llama3: a frequency with fewer turns than this within originalLength is divided by factor.",
    )
    high_frequency_factor: float = Field(
        default=4.0,
        gt=0.0,
        le=65536.0,
        description="For Llama3: a frequency with more turns than this within originalLength does not change.",
    )
    beta_fast: float = Field(
        default=32.0,
        gt=0.0,
        le=65536.0,
        description="For Yarn: a frequency with more turns than this within originalLength does not change.",
    )
    beta_slow: float = Field(
        default=1.0,
        gt=0.0,
        le=65536.0,
        description="For Yarn: a frequency with fewer turns than this within originalLength is divided by factor.",
    )
    truncate: bool = Field(
        default=True,
        description="For Yarn: whether the range of partly scaled frequencies is rounded "
        "outwards to whole frequencies.",
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0.0,
        le=65536.0,
        description="For Yarn: factor of the rotated queries and keys. Absent: 0.1 ln(factor) + 1.",
    )

    RULES = (
        SectionRule(
            "originalLength",
            "self.type == 'Linear' || has(self.originalLength)",
            lambda scaling: scaling.type is RopeScalingType.linear or scaling.original_length is not None,
            "ropeScaling needs originalLength if its type is Llama3 or Yarn",
        ),
        SectionRule(
            "highFrequencyFactor",
            "self.type != 'Llama3' || self.lowFrequencyFactor < self.highFrequencyFactor",
            lambda scaling: (
                scaling.type is not RopeScalingType.llama3
                or scaling.low_frequency_factor < scaling.high_frequency_factor
            ),
            "lowFrequencyFactor must be below highFrequencyFactor",
        ),
    )
