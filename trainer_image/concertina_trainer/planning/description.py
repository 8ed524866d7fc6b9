"""Description of a custom model, for the part of `concertina plan` that has no torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Description:
    """Size and cost of a custom model."""

    weights: int
    trained: int
    """Number of weights that are trained."""
    blocks: int
    in_blocks: int
    """Number of weights that belong to blocks."""
    matrices: int
    """Number of trained weights that are elements of matrices of blocks, which Muon updates."""
    orthogonalized: float
    """Floating-point operations with which Muon orthogonalizes all these matrices once."""
    flops: float
    """Floating-point operations of one element (token or frame), forward and backward."""
    counted: bool
    """True if `flops` was counted by running the loss, or False if the ModelSpec states the number."""
    moved: float
    """Bytes read and written for one element, forward and backward, by operations other than matrix products."""
