"""Cross entropy of the output layer, computed without all logits in memory.

With a vocabulary of 128,256, the logits of 8192 tokens take 4.2 GB in float32, and their gradient takes as much. This
module computes the logits in chunks of rows, and the gradients of each chunk in the forward pass (Liger Kernel, arXiv
2410.10989). Under tensor parallelism, the vocabulary is split over the tensor group, and each rank computes the logits
of its part (Megatron-LM, arXiv 1909.08053, section 3).

torch.nn.functional.linear_cross_entropy accepts no DTensors and no soft cap, and does not count correct predictions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
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

Each additional chunk reads and writes the gradient of the output layer's weight once more, which takes longer than
launching the chunk's kernels.
"""

_correct: ContextVar[list[Tensor] | None] = ContextVar("correct", default=None)


@contextlib.contextmanager
def correct_weights() -> Iterator[list[Tensor]]:
    """Yield a list to which each loss that is computed within the context adds one element.

    The element is the sum of the weights of the tokens that are predicted correctly, a float64 scalar. A token is
    predicted correctly if its logit is the largest. Among equal logits, the logit with the lowest token id counts as
    the largest.

    The outputs of pipeline stages have fixed shapes, so the model can't return these sums in addition to the loss.
    """
    found: list[Tensor] = []
    token = _correct.set(found)
    try:
        yield found
    finally:
        _correct.reset(token)


def count_correct(logits: Tensor, targets: Tensor, token_weights: Tensor) -> None:
    """For a loss of whole logits, add an element to the list of `correct_weights`, if there is such a list.

    Args:
        logits: `[rows, vocabulary]`.
        targets: `[rows]`.
        token_weights: `[rows]`.
    """
    if (found := _correct.get()) is not None:
        found.append(_correct_weight(logits, targets, token_weights, 0, None))


def summed_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, soft_cap: float | None = None
) -> Tensor:
    """Return the sum over tokens of the cross entropy times the token's weight, in float32 or a higher precision.

    Call backward on the result only once.

    Args:
        x: Input of the output layer, `[batch, length, dim]`.
        weight: Weight of the output layer, `[vocabulary, dim]`. If it is a DTensor, its rows are split over a mesh of
            one dimension (the tensor group), and every rank of the group has the same `x`.
        targets: `[batch, length]`, each below the size of the vocabulary.
        token_weights: `[batch, length]`. The gradient of a token's weight is the token's loss.
        soft_cap: Soft cap of the logits (see `soft_capped`), or None.
    """
    mesh, offset, columns = None, 0, len(weight)
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        columns = -(-len(weight) // mesh.size())  # as torch.chunk distributes rows: the last part can be smaller
        offset = mesh.get_local_rank() * columns
        # Each rank computes the gradient of x from its part of the vocabulary, so the gradient is the sum over the
        # group.
        x, weight = cast(DTensor, x).to_local(grad_placements=[Partial()]), weight.to_local()
    rows, targets, token_weights = x.flatten(0, 1), targets.flatten() - offset, token_weights.flatten()
    has_gradient = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (rows, weight, token_weights)]
    rows_per_chunk = max(1, CHUNK_LOGITS // columns)  # the same on all ranks of the group, whose chunks are summed
    losses: list[Tensor] = []
    token_losses: list[Tensor] = []
    found, correct = _correct.get(), []
    row_gradients: list[Tensor] = []
    weight_gradient: Tensor | None = None
    with torch.no_grad():
        for begin in range(0, len(rows), rows_per_chunk):
            chunk = slice(begin, begin + rows_per_chunk)
            logits = soft_capped(F.linear(rows[chunk], weight), soft_cap)
            if found is not None:
                correct.append(_correct_weight(logits, targets[chunk], token_weights[chunk], offset, mesh))
            of_tokens, gradient = _losses_and_gradient(logits, targets[chunk], token_weights[chunk], mesh)
            if soft_cap is not None:
                gradient *= 1 - (logits / soft_cap).square()
            losses.append(torch.sum(of_tokens * token_weights[chunk]))
            token_losses.append(of_tokens)
            if has_gradient[0]:
                row_gradients.append(gradient @ weight)
            if has_gradient[1]:
                weight_gradient = _added(weight_gradient, gradient.T @ rows[chunk])
        total = torch.stack(losses).sum()
        if found is not None:
            found.append(torch.stack(correct).sum())
    if has_gradient[0]:
        total = total + _KnownGradient.apply(rows, torch.cat(row_gradients))
    if weight_gradient is not None:
        total = total + _KnownGradient.apply(weight, weight_gradient.to(weight.dtype))
    if has_gradient[2]:
        total = total + _KnownGradient.apply(token_weights, torch.cat(token_losses))
    return total


def _added(total: Tensor | None, product: Tensor) -> Tensor:
    """Return `total`, the gradient of the weight so far, plus a chunk's gradient `product`.

    From the second chunk on, the sum is in float32, because it would lose digits in a lower precision.
    """
    return product if total is None else precise(total).add_(product)


def _losses_and_gradient(
    logits: Tensor, targets: Tensor, token_weights: Tensor, mesh: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of logits `[rows, vocabulary]`, and the gradient of the weighted sum of the losses.

    The gradient is the one with respect to the logits, in the dtype of the logits. If `mesh` is given, the vocabulary
    is split over the mesh's ranks, and `logits` contains the columns of this rank. A target that is not among these
    columns is a column of another rank.
    """
    is_own = (targets >= 0) & (targets < logits.size(1))
    at_target = torch.arange(len(targets), device=targets.device), targets.where(is_own, 0)
    logarithms = F.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    target_logarithms, scale = logarithms[at_target], token_weights
    if mesh is not None:
        # The softmax so far is over this rank's part of the vocabulary. Correct it to the whole vocabulary.
        own_sums = logits[:, 0] - logarithms[:, 0]  # log of the sum of exponentials
        largest = _reduced(own_sums, "max", mesh)
        sums = largest + _reduced((own_sums - largest).exp(), "sum", mesh).log()
        own_targets = (target_logarithms + own_sums).where(is_own, 0)
        target_logarithms = _reduced(own_targets, "sum", mesh) - sums
        scale = token_weights * (own_sums - sums).exp()
    gradient = logarithms.exp_().mul_(scale[:, None])
    gradient[at_target] -= token_weights.where(is_own, 0)
    return -target_logarithms, gradient.to(logits.dtype)


def _correct_weight(
    logits: Tensor, targets: Tensor, token_weights: Tensor, offset: int, mesh: DeviceMesh | None
) -> Tensor:
    """Return the sum of the weights of the tokens whose logit is the largest, float64.

    If `mesh` is given, the vocabulary is split over the mesh's ranks, and `logits` contains the columns from `offset`
    on. Targets are relative to `offset`.
    """
    largest, ids = logits.max(1)  # the first one of equal logits
    if mesh is not None:
        of_all = _reduced(precise(largest), "max", mesh)
        none = torch.iinfo(ids.dtype).max
        ids = _reduced((ids + offset).where(precise(largest) == of_all, none), "min", mesh) - offset
    return torch.sum(token_weights.where(ids == targets, 0), dtype=torch.float64)


def _reduced(tensor: Tensor, operation: str, mesh: DeviceMesh) -> Tensor:
    reduced: Tensor = functional.all_reduce(tensor, operation, mesh.get_group())
    return reduced  # the first operation on it waits


class _KnownGradient(Function):
    """Autograd function that returns zero, with a gradient for `tensor` that was computed before.

    Adding this zero to a loss makes the backward pass use the given gradient. The input of the output layer and its
    weight each have a node of this class. Zero-bubble pipeline schedules compute the gradients of inputs and of weights
    in two passes, so each node must run in one pass only.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return precise(gradient.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(output_gradient), None
