"""Asynchronous tensor parallelism (async TP): collectives overlap with matrix products.

Source: Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition. A product is cut into as
many pieces as the tensor group has ranks. A rank multiplies one piece while it receives the next one from another rank.

On CUDA, this module calls operations of torch that overlap collectives and products, if the GPUs of a group can read
each other's memory. On CPU, the functions of this module compute the same results with a collective and a product one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory  # defines the operations
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from concertina_trainer.model.decoder import Attention, FeedForward, Products
from concertina_trainer.model.optimizer import local

GATHER_MULTIPLY = torch.ops.symm_mem.fused_all_gather_matmul
MULTIPLY_REDUCE = torch.ops.symm_mem.fused_matmul_reduce_scatter


def overlap(layer: Attention | FeedForward, mesh: DeviceMesh) -> None:
    """Make a layer's collectives overlap with its products, and split its weights over the tensor group `mesh`.

    The first weights are split by output features, and the last weight (output or down) by input features. Each rank
    cuts its part from a whole weight, so the ranks do not communicate.
    """
    layer.products = OverlappedProducts(mesh)
    for name, linear in layer.named_children():
        if not isinstance(linear, nn.Linear):
            continue
        last = name in ("output", "down")
        placement = Shard(1) if last else Shard(0)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [placement], src_data_rank=None))
        if linear.bias is not None:
            of_bias = Replicate() if last else placement
            linear.bias = nn.Parameter(distribute_tensor(linear.bias, mesh, [of_bias], src_data_rank=None))


class OverlappedProducts(Products):
    """Matrix products of a layer in a tensor group, which overlap with the group's collectives.

    The layer's input and its result are split along the sequence: each rank has `[batch, length / ranks, dim]`. In
    between, the features are split: each rank has `[batch, length, features / ranks]`. There is no dropout, because
    `layouts` refuses adapters with asynchronous tensor parallelism.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        # The group's own name, and not the one that all rounds share: torch keeps memory of a group by its name.
        self._group = mesh.get_group().group_name

    def columns(self, x: Tensor, weights: Sequence[nn.Linear], keys: Tensor | None) -> Sequence[Tensor]:
        own_tokens = local(x)
        products = _Columns.apply(_rows(own_tokens), self._group, *(local(linear.weight) for linear in weights))
        return [
            _sequences(product if linear.bias is None else product + local(linear.bias), len(own_tokens))
            for product, linear in zip(products, weights, strict=True)
        ]

    def rows(self, x: Tensor, weight: nn.Linear, keys: Tensor | None) -> Tensor:
        product: Tensor = _Rows.apply(_rows(x), self._group, local(weight.weight))
        result = _sequences(product, len(x)).contiguous()
        if weight.bias is None:
            return result
        # Each rank adds the whole bias to its own tokens, so the bias's gradient is the sum over the group.
        bias = weight.bias.to_local(grad_placements=[Partial()]) if isinstance(weight.bias, DTensor) else weight.bias
        return result + bias


def _rows(x: Tensor) -> Tensor:
    """Return x `[batch, length, width]` as rows `[length * batch, width]`.

    Rows are in the order of positions in the sequence, so that the rows of one rank, a range of positions, are
    contiguous.
    """
    return x.transpose(0, 1).reshape(-1, x.size(2)).contiguous()


def _sequences(rows: Tensor, batch: int) -> Tensor:
    return rows.view(-1, batch, rows.size(1)).transpose(0, 1)


class _Columns(torch.autograd.Function):
    """Products of the tokens of all ranks in the tensor group with this rank's part of each weight.

    The gathered tokens are not kept for the backward pass, because they would be the largest activations that are not
    split over the group. The backward pass gathers the tokens again for the gradients of the weights. This all-gather
    runs while another product is computed (Korthikanti et al. 2022, section 4.2.2).
    """

    @staticmethod
    def forward(ctx: Any, own_rows: Tensor, group: GroupName, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(own_rows, *weights)
        _, products = GATHER_MULTIPLY(own_rows, [weight.t() for weight in weights], 0, group, return_A=False)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own_rows, *weights = ctx.saved_tensors
        gathering = functional.all_gather_single(own_rows, 0, ctx.group)
        gradient = torch.cat(gradients, 1)
        own_gradient = MULTIPLY_REDUCE(gradient, torch.cat(weights), "sum", 0, ctx.group)
        weight_gradients = gradient.t() @ _arrived(gathering)
        return own_gradient, None, *weight_gradients.split([len(weight) for weight in weights])


class _Rows(torch.autograd.Function):
    """Product of all features with the weight, for this rank's tokens.

    Features and weight are split over the tensor group. A reduce-scatter sums the ranks' partial products, and leaves
    each rank with its own tokens.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, group: GroupName, weight: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(features, weight)
        product: Tensor = MULTIPLY_REDUCE(features, weight.t(), "sum", 0, group)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        gradient, (of_features,) = GATHER_MULTIPLY(gradients[0].contiguous(), [weight], 0, ctx.group)
        return of_features, None, gradient.t() @ features


def gather_multiply(
    own_rows: Tensor, weights: Sequence[Tensor], dim: int, group: GroupName, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather `own_rows` from all ranks of the group, and multiply the gathered rows by each of the `weights`.

    This function replaces torch's CPU fallback for the operation, because StepTimes can't measure the waits in the
    fallback.
    """
    whole = _arrived(functional.all_gather_single(own_rows, dim, group))
    return whole if return_A else None, [whole @ weight for weight in weights]


def multiply_reduce(features: Tensor, weight: Tensor, operation: str, dim: int, group: GroupName) -> Tensor:
    return _arrived(functional.reduce_scatter_single(features @ weight, operation, dim, group))


def _arrived(sent: Tensor) -> Tensor:
    """Wait for the result of a collective in a single wait, which StepTimes measures.

    functional.wait_tensor is not used, because it would make two nested waits, and both would be measured.
    """
    return sent.wait() if isinstance(sent, functional.AsyncCollectiveTensor) else sent


IN_TURN: dict[Any, Callable[..., Any]] = {
    GATHER_MULTIPLY.default: gather_multiply,
    MULTIPLY_REDUCE.default: multiply_reduce,
}
"""CPU implementations of the fused operations: a collective and a product, one after the other."""
for operation, in_turn in IN_TURN.items():
    torch.library.impl(operation.name(), "cpu", in_turn)
