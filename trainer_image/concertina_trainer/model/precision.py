"""Conversion of tensors for computations that need float32 or a higher precision."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if its precision is higher."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
