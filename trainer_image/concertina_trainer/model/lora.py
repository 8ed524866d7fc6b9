"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685).

All weights of the base model are frozen. A layer with a frozen weight W `[outputs, inputs]` has two small trained
matrices, A `[rank, inputs]` and B `[outputs, rank]`, and computes x (W + alpha / rank B A)^T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from concertina_trainer.config.model_config import FrozenDtype, LoraConfig, Projection
from concertina_trainer.format.adapters import is_adapter
from concertina_trainer.model import quantized
from concertina_trainer.model.dropout import derived, keep_mask

NUMBERS = {projection: number for number, projection in enumerate(Projection)}
"""Number of each matrix of a block. The dropout masks of the matrix are derived from this number."""


class LoraLinear(nn.Linear):
    codes: nn.Parameter
    scales: nn.Parameter

    def __init__(self, inputs: int, outputs: int, lora: LoraConfig, projection: Projection, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.lora_a = nn.Parameter(torch.empty(lora.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, lora.rank))
        self.scale, self.training_scale, self.dropout = lora.scale, lora.training_scale, lora.dropout
        self.number = NUMBERS[projection]
        self.columns = range(inputs)
        """Columns of the input that this rank has. Tensor parallelism splits the input columns of Output and Down."""

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Compute the layer for x `[batch, length, inputs]`, with dropout if `keys` `[batch, length]` is given.

        Pass `keys` as a keyword argument, because tensor parallelism replaces positional arguments.
        """
        if keys is None:
            return self._frozen(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)
        mask = keep_mask(derived(keys, self.number), self.columns, self.dropout)
        if isinstance(x, DTensor):
            mask = DTensor.from_local(mask, x.device_mesh, x.placements, run_check=False)
        # A product, and not a choice of elements, because DTensor would first sum the gradient over the tensor group.
        return self._frozen(x) + self.training_scale * F.linear(F.linear(x * mask, self.lora_a), self.lora_b)

    def _frozen(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return quantized.linear(x, self.codes, self.scales, self.bias)
        return F.linear(x, self.weight, self.bias)


def linear(inputs: int, outputs: int, lora: LoraConfig | None, projection: Projection, bias: bool = False) -> nn.Linear:
    if lora is None or projection not in lora.targets:
        return nn.Linear(inputs, outputs, bias)
    return LoraLinear(inputs, outputs, lora, projection, bias)


def product(x: Tensor, layer: nn.Linear, keys: Tensor | None) -> Tensor:
    """Return the result of a layer, with dropout if the layer has adapters and `keys` (see `LoraLinear.forward`)."""
    result: Tensor = layer(x, keys=keys) if isinstance(layer, LoraLinear) else layer(x)
    return result


def freeze(model: nn.Module) -> None:
    """Freeze all parameters except the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = is_adapter(name)


def set_frozen_dtype(model: nn.Module, dtype: FrozenDtype) -> None:
    """Convert the frozen parameters to the dtype in which they are stored in memory.

    FSDP converts gathered weights to the dtype of the computation, so the layers do not see this dtype. Float32 means
    torch's default dtype.
    """
    if dtype is FrozenDtype.float32:
        return
    converted: dict[nn.Parameter, nn.Parameter] = {}  # tied weights remain one parameter
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                if parameter not in converted:
                    converted[parameter] = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                setattr(module, name, converted[parameter])


def quantize(model: nn.Module, dtype: FrozenDtype) -> None:
    """Replace the weights of layers with adapters by codes, on the meta device, if `dtype` is a quantized one."""
    if dtype.quantized:
        for layer in model.modules():
            if isinstance(layer, LoraLinear):
                quantized.quantize_layer(layer, dtype)
