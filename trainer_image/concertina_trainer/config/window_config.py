"""spec.trainer.model.window: layers in which each token attends only to the nearest tokens before it."""

from __future__ import annotations

from pydantic import Field

from concertina_trainer.config.section import Section


class WindowConfig(Section):
    """Attention window: in some or all layers, a token attends only to itself and to the tokens just before it."""

    size: int = Field(ge=1, le=1048576, description="Number of tokens in the window.")
    full_every: int | None = Field(
        default=None,
        ge=2,
        le=512,
        description="Interval of the layers without a window. With 6, every sixth layer attends to all "
        "previous tokens. Absent: all layers have the window.",
    )
    rope_theta: float | None = Field(
        default=None,
        ge=1.0,
        le=1e9,
        description="Base of the rotary position frequencies in layers with the window. Their frequencies "
        "are not scaled. Absent: the same frequencies as in the other layers.",
    )
