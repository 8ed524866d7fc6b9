"""spec.trainer.model.window: layers in which each token attends only to the nearest tokens before it."""

from __future__ import annotations

from pydantic import Field

from concertina_trainer.config.section import Section


class WindowConfig(Section):
    """Attention window: in some or all layers, a token attends only to itself and to the tokens just before it."""

    size: int = Field(ge=1, le=1048576, description="Tokens of the window.")
    full_every: int | None = Field(
        default=None,
        ge=2,
        le=512,
        description="Distance of the layers without a window: with 6, every sixth layer attends to all tokens before. "
        "Absent: all layers have the window.",
    )
    rope_theta: float | None = Field(
        default=None,
        ge=1.0,
        le=1e9,
        description="Base of the rotary position frequencies in layers with the window, where they are not scaled. "
        "Absent: positions are those of the other layers.",
    )
