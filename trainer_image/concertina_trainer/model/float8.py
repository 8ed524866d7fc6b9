"""Matrix products in float8 (e4m3), with a scale for each row of both factors.

Each row of a factor is multiplied by the largest power of two with which its elements fit into float8. In the forward
pass, a row is one token of the input, or one output of the weight. In the gradient of the input, a row is one token of
the gradient, or one input of the weight. The scale of a token therefore does not depend on the other tokens of its
microbatch. With another number of ranks, a microbatch would contain different tokens. The gradient of the weight is a
sum over tokens, so this gradient is computed in bfloat16.

Source of the format: Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concertina_state.errors import InvalidInput
from concertina_trainer.model.decoder import Decoder

LEAST_CAPABILITY = (9, 0)
"""Minimum compute capability with which CUDA multiplies float8 matrices that have a scale for each row."""
_MOST_EXPONENT = 126


class Float8Linear(nn.Linear):
    """Linear layer that multiplies in float8. Its parameters are those of `nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = cast(Tensor, _Product.apply(x.flatten(0, -2), self.weight))
        result: Tensor = rows.unflatten(0, x.shape[:-1])
        return result if self.bias is None else result + self.bias


def use_float8(model: Decoder) -> None:
    """Make the linear layers of all blocks multiply in float8.

    Routers, experts and the output layer are not changed.
    """
    for block in model.blocks.values():
        for layer in block.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = Float8Linear


def check_device(device: torch.device) -> None:
    """Check that the device supports float8. On a CPU, values are rounded to float8 and multiplied in float32.

    Raises:
        InvalidInput: When the device does not support float8.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise InvalidInput(
            f"trainer.precision Float8 needs GPUs of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} (NVIDIA "
            f"Hopper) or higher, and {torch.cuda.get_device_name(device)} has a lower one: set precision to BFloat16."
        )


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8, and the factor float32 `[rows, 1]` by which each row has to be multiplied afterwards.

    The factor of a row with an element that is not finite is NaN.
    """
    values = rows.float()
    largest = values.abs().amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    # The largest number of float8 is 0.875 * 2**9.
    exponent = (9 - exponent - (mantissa > 0.875).int()).clamp(max=_MOST_EXPONENT)
    one = torch.ones_like(mantissa)
    # The difference is 0, or NaN if an element is not finite. Float8 would store infinity as its largest number.
    factors = torch.ldexp(one, -exponent) + (largest - largest)
    return (values * torch.ldexp(one, exponent)).to(torch.float8_e4m3fn), factors


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a` `[m, k]` times the transpose of `b` `[n, k]`, both rounded to float8, in the dtype of `a`."""
    (a8, a_factors), (b8, b_factors) = rounded(a), rounded(b)
    if a.device.type == "cuda":
        found: Tensor = torch._scaled_mm(a8, b8.t(), a_factors, b_factors.t(), out_dtype=a.dtype)
        return found
    return (F.linear(a8.float(), b8.float()) * a_factors * b_factors.t()).to(a.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        [gradient] = gradients
        x, weight = ctx.saved_tensors
        return product(gradient, weight.t().contiguous()), gradient.t() @ x
