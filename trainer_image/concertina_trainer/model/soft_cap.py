"""Soft bounds of logits and attention scores (Gemma 2, arXiv 2408.00118, section 2)."""

from __future__ import annotations

from torch import Tensor


def soft_capped(values: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(values / cap)`, which is between -cap and cap, or `values` themselves if `cap` is None."""
    return values if cap is None else cap * (values / cap).tanh()
