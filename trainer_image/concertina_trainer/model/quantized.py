"""Frozen weights in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

A frozen matrix `[rows, columns]` is cut into blocks of BLOCK columns of one row. A block has one scale, its largest
absolute value, and a code for each element. Each block is within one row, so a rank can quantize its own rows alone,
and the numbers are the same in every parallel layout (decision "Frozen weights are quantized in blocks of a row").

The matrix is multiplied in the dtype of the input. The matrix is computed from its codes in the forward pass, and again
in the backward pass. Between the two, only the codes stay in memory.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from concertina_trainer.config.model_config import BLOCK, NORMAL_FLOAT, FrozenDtype

CODES, SCALES = "codes", "scales"
"""Names of the two parameters of a layer that replace the parameter `weight`."""
HALF_BYTE = 16


def quantized(weight: Tensor, dtype: FrozenDtype) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a matrix `[rows, columns]` of bfloat16 values.

    The codes are uint8 `[rows, columns / 2]` for NormalFloat4, with the first of two elements in the upper bits, and
    int8 `[rows, columns]` for Int8. The scales are bfloat16 `[rows, columns / BLOCK]`. They are exact, because the
    matrix is bfloat16.
    """
    rows, columns = weight.shape
    _values_of_bytes(weight.device)  # now, because compiled code can't
    blocks = weight.float().view(rows, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True)
    # In float32, every device rounds a quotient of tensors to the nearest number.
    shares = (blocks / torch.where(scales == 0, torch.ones_like(scales), scales)).view(rows, columns)
    kept_scales = scales.view(rows, columns // BLOCK).to(torch.bfloat16)
    if dtype is FrozenDtype.int8:
        return (shares * 127).round().to(torch.int8), kept_scales
    values = torch.tensor(NORMAL_FLOAT, device=weight.device)
    nearest = torch.bucketize(shares, (values[1:] + values[:-1]) / 2).clamp(max=HALF_BYTE - 1).to(torch.uint8)
    return nearest[:, ::2] << 4 | nearest[:, 1::2], kept_scales


_TABLES: dict[torch.device, Tensor] = {}


def _values_of_bytes(device: torch.device) -> Tensor:
    """Return the two values that each byte of codes represents, `[256, 2]`.

    The table stays on the device, because each copy to the device would make the host wait.
    """
    if (table := _TABLES.get(device)) is not None:
        return table
    of_code = torch.tensor(NORMAL_FLOAT, device=device)
    table = torch.stack([of_code.repeat_interleave(HALF_BYTE), of_code.repeat(HALF_BYTE)], 1)
    if type(table) is Tensor:  # the planner's tensors have no values
        _TABLES[device] = table
    return table


def dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix `[rows, columns]` that codes and scales from `quantized` represent."""
    rows, blocks = scales.shape
    if codes.dtype == torch.int8:
        # The product of a code and a scale is exact in float32, so the result is rounded once.
        values = codes.view(rows, blocks, BLOCK).float() * scales[:, :, None].float() * (1 / 127)
    else:
        values = _values_of_bytes(codes.device)[codes.int()].view(rows, blocks, BLOCK) * scales[:, :, None].float()
    return values.view(rows, blocks * BLOCK).to(dtype)


def quantize_layer(layer: nn.Linear, dtype: FrozenDtype) -> None:
    """Replace the weight of a layer on the meta device by codes and scales, divided among ranks like the weight."""
    columns = 2 if dtype is FrozenDtype.normal_float4 else 1
    code_dtype = torch.uint8 if dtype is FrozenDtype.normal_float4 else torch.int8
    parts = {CODES: (columns, code_dtype), SCALES: (BLOCK, torch.bfloat16)}
    weight = layer.weight
    for name, (per_element, part_dtype) in parts.items():
        whole = torch.empty(weight.size(0), weight.size(1) // per_element, dtype=part_dtype, device="meta")
        if isinstance(weight, DTensor):
            whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(whole, requires_grad=False))
    layer.register_parameter("weight", None)


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of `x` `[..., columns]` and the transposed matrix, plus the bias.

    With tensor parallelism, all arguments are DTensors on the tensor group's mesh, as for `F.linear`.
    """
    if isinstance(codes, DTensor):
        assert isinstance(x, DTensor)
        assert isinstance(scales, DTensor)
        by_rows, last = codes.placements == (Shard(0),), Shard(x.dim() - 1)
        local = x.to_local(grad_placements=[Partial() if by_rows else last])
        product: Tensor = DTensor.from_local(
            _multiply(local, codes.to_local(), scales.to_local()), codes.device_mesh, [last if by_rows else Partial()],
            run_check=False,
        )  # fmt: skip
    else:
        product = _multiply(x, codes, scales)
    return product if bias is None else product + bias


def _multiply(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return cast(Tensor, _Product.apply(x, codes, scales))


class _Product(torch.autograd.Function):
    """Product with a dequantized matrix. For the backward pass, autograd keeps only the matrix's codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, dequantized(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = gradients
        codes, scales = ctx.saved_tensors
        return gradient @ dequantized(codes, scales, gradient.dtype), None, None
