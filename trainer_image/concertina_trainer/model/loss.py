"""Cross entropy of the output layer, computed without all logits in memory.

With a vocabulary of 128,256, the logits of 8192 tokens take 4.2 GB in float32, and their gradient as much. Here the
rows are computed in chunks, and the gradients of each chunk in the forward pass (Liger Kernel, arXiv 2410.10989). With
tensor parallelism, each rank has the logits of its part of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

torch.nn.functional.linear_cross_entropy takes no weights of tokens and no DTensors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from concertina_trainer.model.precision import precise
from concertina_trainer.model.soft_cap import soft_capped

CHUNK_LOGITS = 2**28
"""Maximum number of logits of a chunk: 1 GiB in float32.

Each further chunk reads and writes the gradient of the weight, which takes longer than the chunk's overhead.
"""


def summed_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, soft_cap: float | None = None
) -> Tensor:
    """Return the sum of the tokens' cross entropies, each times its weight, at least in float32.

    The result can be differentiated once.

    Args:
        x: Input of the output layer, `[batch, length, dim]`.
        weight: Weight of the output layer, `[vocabulary, dim]`. If it is a DTensor, its rows are distributed over a
            mesh of one dimension, and every rank of the mesh has the same `x`.
        targets: `[batch, length]`, each below the size of the vocabulary.
        token_weights: `[batch, length]`.
        soft_cap: Soft bound of the logits.
    """
    mesh, offset = None, 0
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        offset = mesh.get_local_rank() * -(-len(weight) // mesh.size())  # as torch.chunk distributes rows
        # Each rank computes the gradient of x for its part of the vocabulary.
        x, weight = cast(DTensor, x).to_local(grad_placements=[Partial()]), weight.to_local()
    rows, targets, token_weights = x.flatten(0, 1), targets.flatten() - offset, token_weights.flatten()
    has_gradient = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (rows, weight)]
    rows_per_chunk = max(1, CHUNK_LOGITS // len(weight))
    losses: list[Tensor] = []
    row_gradients: list[Tensor] = []
    weight_gradient: Tensor | None = None
    with torch.no_grad():
        for begin in range(0, len(rows), rows_per_chunk):
            chunk = slice(begin, begin + rows_per_chunk)
            logits = soft_capped(F.linear(rows[chunk], weight), soft_cap)
            loss, gradient = _loss_and_gradient(logits, targets[chunk], token_weights[chunk], mesh)
            if soft_cap is not None:
                gradient *= 1 - (logits / soft_cap).square()
            losses.append(loss)
            if has_gradient[0]:
                row_gradients.append(gradient @ weight)
            if has_gradient[1]:
                weight_gradient = _added(weight_gradient, gradient.T @ rows[chunk])
        total = torch.stack(losses).sum()
    if has_gradient[0]:
        total = total + _KnownGradient.apply(rows, torch.cat(row_gradients))
    if weight_gradient is not None:
        total = total + _KnownGradient.apply(weight, weight_gradient.to(weight.dtype))
    return total


def _added(total: Tensor | None, product: Tensor) -> Tensor:
    """Add a chunk's gradient, from the second one on in float32: the sum would lose digits in a lower precision."""
    return product if total is None else precise(total).add_(product)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, token_weights: Tensor, mesh: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of logits `[rows, vocabulary]`, and its gradient with respect to them in their type.

    A target outside the range of this rank's logits is a row of another rank.
    """
    is_own = (targets >= 0) & (targets < logits.size(1))
    at_target = torch.arange(len(targets), device=targets.device), targets.where(is_own, 0)
    logarithms = F.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    target_logarithms, scale = logarithms[at_target], token_weights
    if mesh is not None:
        # They are relative to the sum of this rank's exponentials, and have to be to the sum of all ranks'.
        own_sums = logits[:, 0] - logarithms[:, 0]  # as logarithms
        largest = _reduced(own_sums, "max", mesh)
        sums = largest + _reduced((own_sums - largest).exp(), "sum", mesh).log()
        own_targets = (target_logarithms + own_sums).where(is_own, 0)
        target_logarithms = _reduced(own_targets, "sum", mesh) - sums
        scale = token_weights * (own_sums - sums).exp()
    gradient = logarithms.exp_().mul_(scale[:, None])
    gradient[at_target] -= token_weights.where(is_own, 0)
    return -torch.sum(target_logarithms * token_weights), gradient.to(logits.dtype)


def _reduced(tensor: Tensor, operation: str, mesh: DeviceMesh) -> Tensor:
    reduced: Tensor = functional.all_reduce(tensor, operation, mesh.get_group())
    return reduced  # the first operation on it waits


class _KnownGradient(Function):
    """Zero, whose gradient with respect to a tensor is given.

    The tensors of a loss have one each, so that schedules that compute the gradients of inputs and of weights apart
    (zero bubble) run each once.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return precise(gradient.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(output_gradient), None
