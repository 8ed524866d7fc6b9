"""Computations for which half precision does not suffice."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
