"""The optimizer Muon (Jordan et al. 2024), which orthogonalizes a matrix's momentum before adding it to the matrix.

The orthogonalization needs the whole matrix, so the ranks that hold its shards gather it, one matrix at a time. Each of
these ranks then computes the same result, and uses its own shard of the result. All computations are in the dtype of
the weights (decision "Muon orthogonalizes whole matrices in float32").
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from concertina_state.placement import Cut, box
from concertina_trainer.config.optimizer_kinds import ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, as in torch.optim.Muon."""
EPSILON = 1e-7
"""Smallest norm by which a matrix is divided, as in torch.optim.Muon. A matrix of zeros therefore stays zero."""
ROOT_MEAN_SQUARE = 0.2
"""Root mean square of an update with the learning rate 1, as usual for AdamW (Liu et al. 2025, arXiv 2502.16982)."""
PIECE = 4 << 20
"""Number of elements of experts' matrices to orthogonalize at a time."""


def advanced(momentum: Tensor, gradient: Tensor, factor: float, nesterov: bool) -> Tensor:
    """Add a gradient to `momentum` in place, and return the matrix to orthogonalize.

    The average is computed in the dtype of the gradient, and then rounded to the dtype of `momentum`. The gradient is
    overwritten.
    """
    average = momentum.to(gradient.dtype)  # `momentum` itself, if the dtypes are equal
    average.lerp_(gradient, 1 - factor)
    if average is not momentum:
        momentum.copy_(average)
    return gradient.lerp_(average, factor) if nesterov else average


def scale(shape: torch.Size) -> float:
    """Return the factor that gives the elements of an orthogonalized matrix the root mean square ROOT_MEAN_SQUARE."""
    return ROOT_MEAN_SQUARE * math.sqrt(max(shape[-2:]))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices `[..., rows, columns]` with the same singular vectors, and with singular values near 1.

    Five iterations of Newton-Schulz map singular values of more than 1/200 of the matrix's norm to 0.7 to 1.2, and
    smaller ones to smaller values.
    """
    batch = matrices.reshape(-1, *matrices.shape[-2:]).contiguous()
    at_once = max(1, PIECE // max(1, batch.size(1) * batch.size(2)))
    results = [_iterated(piece) for piece in batch.split(at_once)]
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result.reshape(matrices.shape).contiguous()


def _iterated(batch: Tensor) -> Tensor:
    """Orthogonalize matrices `[n, rows, columns]`. Wide matrices need smaller products than tall ones."""
    a, b, c = COEFFICIENTS
    tall = batch.size(1) > batch.size(2)
    x = batch.mT if tall else batch
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def direction(update: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of an orthogonalized matrix.

    `update` is this rank's shard of the matrix before the orthogonalization. `parameter` is the weight, which is
    divided among ranks in the same way. If it is a DTensor, all ranks of its mesh must call this function in the same
    order of parameters, even ranks that have no elements of the parameter.
    """
    with _exact_products():
        if not isinstance(parameter, DTensor):
            return orthogonalized(update)
        mesh, placements = parameter.device_mesh, parameter.placements
        shards = DTensor.from_local(
            update.to(torch.device(mesh.device_type)), mesh, placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        kept = [_divides_batch(placement, parameter.dim()) for placement in placements]
        gathered = list(placements)
        for dimension, keep in enumerate(kept):  # FSDP's shards are parts of those of a tensor group
            if not keep and not isinstance(placements[dimension], Replicate):
                gathered[dimension] = Replicate()
                shards = shards.redistribute(placements=gathered)
        whole = orthogonalized(shards.to_local())
    cuts = [Cut(None) if keep else _cut(placement) for placement, keep in zip(placements, kept, strict=True)]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    own = box(whole.shape, mesh.shape, coordinate, cuts)
    part = whole[tuple(slice(begin, begin + size) for begin, size in zip(own.offsets, own.shape, strict=True))]
    assert part.shape == update.shape
    shard = part.clone(memory_format=torch.contiguous_format)  # which does not keep the whole matrix in memory
    del whole, part
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh.size(dimension) > 1 and shard.numel():
            # Other kinds of processors may round products in another way, and copies must stay equal.
            dist.broadcast(shard, group=mesh.get_group(dimension), group_src=0)
    return shard.to(update.device)


def _divides_batch(placement: Placement, dimensions: int) -> bool:
    """Return whether `placement` divides only the batch of matrices (such as experts), and not the matrices themselves.

    Matrices are the last two of the dimensions.
    """
    return isinstance(placement, Shard | _StridedShard) and placement.dim < dimensions - 2


def _cut(placement: Placement) -> Cut:
    if isinstance(placement, Shard | _StridedShard):
        return Cut(placement.dim, late=isinstance(placement, _StridedShard))
    return Cut(None)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Return a context in which products of float32 matrices are computed in float32, not in TF32 or bfloat16."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
