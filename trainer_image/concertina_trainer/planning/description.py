"""What a model of one's own is, for whoever plans it without torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Description:
    weights: int
    trained: int
    """Of the weights."""
    blocks: int
    in_blocks: int
    """Weights."""
    flops: float
    """Of one element, forward and backward."""
    counted: bool
    """Not told by the ModelSpec."""
    moved: float
    """Bytes that all other operations than products read and write for an element, forward and backward."""
