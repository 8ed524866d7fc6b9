"""Matrices that each rank orthogonalizes in a step of the Muon optimizer, and the traffic for this."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from concertina.planning.layout import ParallelLayout
from concertina.planning.traffic import HELD, Traffic, rank_weights, routed_blocks, stage_blocks
from concertina_trainer.config.model_config import FEED_FORWARD, Projection
from concertina_trainer.degrees import Dimension
from concertina_trainer.model.flops import orthogonalization_flops


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Matrices of one shape that one rank orthogonalizes."""

    count: int
    rows: int
    columns: int
    tensor: bool = True
    """True if tensor parallelism divides each of the matrices among ranks."""
    experts: bool = False
    """True if the matrices belong to experts, which expert parallelism distributes over ranks."""
    gathered: bool = True
    """True if FSDP divides each matrix among ranks, so that the ranks must gather the matrix first."""

    @property
    def elements(self) -> int:
        return self.count * self.rows * self.columns


def flops(layout: ParallelLayout) -> float:
    """Return the floating-point operations of one rank to orthogonalize its matrices in a step; 0 without Muon."""
    if layout.trainer.optimizer.kind.others is None:
        return 0.0
    if layout.own is not None:
        return layout.own.orthogonalized
    return sum(each.count * orthogonalization_flops(each.rows, each.columns) for each in orthogonalized(layout))


def traffic(layout: ParallelLayout) -> list[Traffic]:
    """Return the traffic of one rank for Muon in a step: gathers of matrices, and broadcasts of their updates.

    All transfers are in float32. A matrix that both tensor parallelism and FSDP divide is gathered twice: first in the
    FSDP group, and then in the tensor group. The list is empty without Muon.
    """
    if layout.trainer.optimizer.kind.others is None:
        return []
    weights, degree = rank_weights(layout), layout.parallelism.tensor
    matrices = list(orthogonalized(layout))
    dense, experts = ([each for each in matrices if each.experts is routed] for routed in (False, True))
    cut, whole = ([each for each in dense if each.tensor is divided] for divided in (True, False))
    gathered = [each for each in experts if each.gathered]
    copies, copied = layout.degree(Dimension.replicate), "broadcast of matrices' updates"
    parts = [
        _traffic(Dimension.shard, "all-gather of matrices for Muon", weights.ranks, cut, degree),
        _traffic(Dimension.shard, "all-gather of matrices for Muon", weights.ranks, whole),
        _traffic(Dimension.tensor, "all-gather of matrices for Muon", degree, cut),
        _traffic(Dimension.shard, "all-gather of experts for Muon", weights.expert_ranks, gathered),
        _traffic(Dimension.replicate, copied, copies, cut, weights.ranks * degree),
        _traffic(Dimension.tensor, copied, degree, whole, weights.ranks),
        _traffic(Dimension.replicate, copied, copies, whole, weights.ranks),
        _traffic(Dimension.replicate, copied, copies, experts, weights.expert_ranks if gathered else 1),
    ]
    return [part for part in parts if part.ranks > 1 and part.bytes]


def _traffic(dimension: Dimension, name: str, ranks: int, matrices: Sequence[Matrices], parts: int = 1) -> Traffic:
    """Return the traffic of one collective that transfers one of `parts` equal parts of each matrix."""
    size = HELD * sum(each.elements for each in matrices) / parts
    return Traffic(dimension, name, ranks, sum(each.count for each in matrices), size, exposed=True)


def orthogonalized(layout: ParallelLayout) -> Iterator[Matrices]:
    """Yield the matrices that one rank orthogonalizes in a step: those of its blocks, or of their LoRA adapters.

    For a custom model, only the number of elements is known and not the shapes. The result is then one column with all
    elements.
    """
    if layout.own is not None:
        yield Matrices(1, layout.own.matrices, 1)
        return
    model = layout.trainer.model
    for projection, matrices in _of_projections(layout):
        if model.lora is None:
            yield matrices
        elif projection in model.lora.targets:
            # Tensor groups divide one of the two, which is too small to count.
            yield dataclasses.replace(matrices, rows=model.lora.rank, tensor=False)
            yield dataclasses.replace(matrices, columns=model.lora.rank, tensor=False)
    if model.lora is None and model.experts is not None:
        yield Matrices(routed_blocks(layout), model.experts.count, model.dim, tensor=False)  # routers


def _of_projections(layout: ParallelLayout) -> Iterator[tuple[Projection, Matrices]]:
    model, blocks, routed = layout.trainer.model, stage_blocks(layout), routed_blocks(layout)
    for projection in Projection:
        inputs, outputs = model.shape(projection)
        count = blocks - routed if projection in FEED_FORWARD else blocks
        yield projection, Matrices(count, outputs, inputs)
    if model.experts is None:
        return
    number, gathered = _experts_of_layer(layout)
    shared = model.experts.shared * model.expert_dim
    for projection in FEED_FORWARD:
        for width, experts, count in ((shared, False, routed), (model.expert_dim, True, routed * number)):
            rows, columns = (model.dim, width) if projection is Projection.down else (width, model.dim)
            yield projection, Matrices(count, rows, columns, not experts, experts, gathered or not experts)


def _experts_of_layer(layout: ParallelLayout) -> tuple[int, bool]:
    """Return how many experts of a layer one rank orthogonalizes, and whether it must gather their matrices.

    FSDP distributes a layer's experts among ranks. If there are more ranks than experts, FSDP divides each expert's
    matrices instead.
    """
    model = layout.trainer.model
    assert model.experts is not None
    experts, ranks = model.experts.count // layout.parallelism.expert, rank_weights(layout).expert_ranks
    gathered = experts < ranks and model.expert_dim % ranks == model.dim % ranks == 0
    return (experts if gathered else math.ceil(experts / ranks)), gathered
