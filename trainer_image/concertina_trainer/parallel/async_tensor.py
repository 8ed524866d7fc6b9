"""Tensor parallelism that sends while it multiplies (torch calls it async TP; Wang et al. 2023, Overlap Communication
with Dependent Computation via Decomposition): a product in as many pieces as a group has ranks, of which each is
multiplied while that of the next rank is on its way.

torch's operations do so on CUDA, where the GPUs of a group read each other's memory. On CPU ours give the same, one
after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory  # defines the operations
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import Shard, distribute_tensor

from concertina_trainer.model.decoder import Attention, FeedForward, Products
from concertina_trainer.model.optimizer import local

GATHER_MULTIPLY = torch.ops.symm_mem.fused_all_gather_matmul
MULTIPLY_REDUCE = torch.ops.symm_mem.fused_matmul_reduce_scatter


def overlap(layer: Attention | FeedForward, mesh: DeviceMesh) -> None:
    """Each rank cuts its own whole weights, so nothing is sent."""
    layer.products = OverlappedProducts(mesh)
    for name, linear in layer.named_children():
        assert isinstance(linear, nn.Linear)
        placement = Shard(1) if name in ("output", "down") else Shard(0)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [placement], src_data_rank=None))


class OverlappedProducts(Products):
    """Of the ranks of a tensor group, each of which has some tokens of a layer's input and of its result."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group().group_name

    def columns(self, x: Tensor, weights: Sequence[nn.Linear]) -> Sequence[Tensor]:
        mine = local(x)
        found = _Columns.apply(_rows(mine), self._group, *(local(each.weight) for each in weights))
        return [_sequences(each, len(mine)) for each in found]

    def rows(self, x: Tensor, weight: nn.Linear) -> Tensor:
        found: Tensor = _Rows.apply(_rows(x), self._group, local(weight.weight))
        return _sequences(found, len(x)).contiguous()


def _rows(x: Tensor) -> Tensor:
    """Of [batch, length, width] the tokens by their place in a sequence, so that a rank's are next to each other."""
    return x.transpose(0, 1).reshape(-1, x.size(2)).contiguous()


def _sequences(rows: Tensor, batch: int) -> Tensor:
    return rows.view(-1, batch, rows.size(1)).transpose(0, 1)


class _Columns(torch.autograd.Function):
    """All ranks' tokens, by each weight. What was gathered is gathered again for the weights' gradients (as by
    Korthikanti et al. 2022, section 4.2.2), beside a product: kept, it would be the largest of a layer's activations
    that the group does not cut."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: GroupName, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(mine, *weights)
        _, found = GATHER_MULTIPLY(mine, [each.t() for each in weights], 0, group, return_A=False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mine, *weights = ctx.saved_tensors
        begun = functional.all_gather_single(mine, 0, ctx.group)
        gradient = torch.cat(gradients, 1)
        of_mine = MULTIPLY_REDUCE(gradient, torch.cat(weights), "sum", 0, ctx.group)
        of_weights = gradient.t() @ _arrived(begun)
        return of_mine, None, *of_weights.split([len(each) for each in weights])


class _Rows(torch.autograd.Function):
    """The sum over ranks of what each has of the tokens' features by its part of the weight, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, group: GroupName, weight: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(features, weight)
        found: Tensor = MULTIPLY_REDUCE(features, weight.t(), "sum", 0, group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        gradient, (of_features,) = GATHER_MULTIPLY(gradients[0].contiguous(), [weight], 0, ctx.group)
        return of_features, None, gradient.t() @ features


def gather_multiply(
    mine: Tensor, weights: Sequence[Tensor], dim: int, group: GroupName, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """As torch's fallback, which waits where it can't be timed."""
    whole = _arrived(functional.all_gather_single(mine, dim, group))
    return whole if return_A else None, [whole @ weight for weight in weights]


def multiply_reduce(features: Tensor, weight: Tensor, operation: str, dim: int, group: GroupName) -> Tensor:
    return _arrived(functional.reduce_scatter_single(features @ weight, operation, dim, group))


def _arrived(sent: Tensor) -> Tensor:
    """functional.wait_tensor would wait twice, one within the other, and be timed so."""
    return sent.wait() if isinstance(sent, functional.AsyncCollectiveTensor) else sent


IN_TURN: dict[Any, Callable[..., Any]] = {
    GATHER_MULTIPLY.default: gather_multiply,
    MULTIPLY_REDUCE.default: multiply_reduce,
}
"""What each does, by operations that send or multiply."""
for each, in_turn in IN_TURN.items():
    torch.library.impl(each.name(), "cpu", in_turn)
