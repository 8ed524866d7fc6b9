"""Description of a custom model, for planning without torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Description:
    """Size and cost of a custom model."""

    weights: int
    trained: int
    """Number of the weights that are trained."""
    blocks: int
    in_blocks: int
    """Number of weights in blocks."""
    flops: float
    """Operations of one element, forward and backward."""
    counted: bool
    """Whether `flops` was counted, and not given by the ModelSpec."""
    moved: float
    """Bytes that operations other than products read and write for an element, forward and backward."""
