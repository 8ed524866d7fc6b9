"""Bytes that one rank's collectives move in a step, by dimension: formulas for how the bundled trainer is divided.

tests/train/trainer/test_planning.py counts the same in the trainer's own code.
"""

from __future__ import annotations

import dataclasses
import math

from concertina.planning.layout import DerivedGroup, Group, ParallelLayout
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.data.read.batch import BatchPlan, batch_plan
from concertina_trainer.degrees import Dimension
from concertina_trainer.layouts import frees_weights

COMPUTED, REDUCED, HELD = 2, 4, 4
"""Bytes of a number: weights and activations travel in bfloat16, gradients in float32; weights are held in float32."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    dimension: Group
    """Dimension of the group. `shard` is FSDP's, over context groups too, and for experts over tensor groups."""
    name: str
    ranks: int
    """Number of ranks in the group."""
    times: int
    """Number of collectives in a step."""
    bytes: float
    """Bytes that are gathered, reduced or sent in a step."""
    exposed: bool
    """Whether nothing is computed meanwhile."""

    @property
    def sent(self) -> float:
        """Bytes that leave the rank, by ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather.
        """
        if self.dimension is Dimension.pipeline:
            return self.bytes
        part = (self.ranks - 1) / self.ranks
        return self.bytes * part * (2 if self.dimension is Dimension.replicate else 1)


def batch(layout: ParallelLayout) -> BatchPlan:
    return batch_plan(layout.trainer, layout.degrees)


def stage_blocks(layout: ParallelLayout) -> int:
    """Return the largest number of blocks of a rank."""
    return math.ceil(layout.blocks / layout.parallelism.pipeline)


def routed_blocks(layout: ParallelLayout) -> int:
    """Return how many of the `stage_blocks` have experts."""
    return min(stage_blocks(layout), layout.trainer.model.routed_layers)


@dataclasses.dataclass(frozen=True)
class RankWeights:
    """Largest number of weights of a rank when they are gathered to compute.

    Only tensor and expert parallelism divide them then.
    """

    blocks: float
    ends: float
    """Weights before the blocks, or after them."""
    experts: float
    ranks: int
    """Number of ranks that share all weights but experts."""
    expert_ranks: int
    """Number of ranks that share the same experts."""

    @property
    def held(self) -> float:
        """Number of weights that this rank holds."""
        return self.held_blocks + self.ends / self.ranks

    @property
    def held_blocks(self) -> float:
        return self.blocks / self.ranks + self.experts / self.expert_ranks

    @property
    def whole(self) -> float:
        return self.blocks + self.ends + self.experts


def rank_weights(layout: ParallelLayout) -> RankWeights:
    if layout.own is not None:
        ranks, ends = layout.degree(Dimension.shard), layout.own.weights - layout.own.in_blocks
        return RankWeights(layout.own.in_blocks, ends, 0.0, ranks, ranks)
    model, parallelism, routed = layout.trainer.model, layout.parallelism, routed_blocks(layout)
    embedding = model.vocab_size * model.dim
    ends = embedding * (2 if parallelism.pipeline == 1 and not model.tie_embeddings else 1)
    experts = model.experts.count if model.experts else 0
    router = experts * model.dim
    # Routers are not divided.
    cut = (stage_blocks(layout) - routed) * model.block_weights + routed * (model.routed_block_weights(0) - router)
    shared = layout.degree(Dimension.shard) * parallelism.context
    dealt_out = routed * experts * model.expert_weights / parallelism.expert
    return RankWeights(
        cut / parallelism.tensor + routed * router, ends / parallelism.tensor, dealt_out, shared,
        shared * parallelism.tensor // parallelism.expert,
    )  # fmt: skip


def traffic(layout: ParallelLayout) -> list[Traffic]:
    parallelism, plan = layout.parallelism, batch(layout)
    tokens = plan.rows * layout.trainer.model.sequence_length / parallelism.context
    residual = tokens * layout.trainer.model.dim * COMPUTED
    parts = _of_weights(layout, plan)
    if parallelism.tensor > 1:
        parts += _of_tensor_groups(layout, plan, residual)
    if parallelism.context > 1:
        parts.append(_of_context_groups(layout, plan))
    if parallelism.expert > 1:
        parts.append(_of_experts(layout, plan.microbatches, residual / parallelism.tensor))
    if parallelism.pipeline > 1:
        times = plan.microbatches * (2 * parallelism.stages_per_rank - 1)
        parts.append(
            Traffic(
                Dimension.pipeline,
                "activations and their gradients",
                2,
                times,
                times * residual / parallelism.tensor,
                False,
            )
        )
    return parts


def host_bytes(layout: ParallelLayout) -> float:
    """Return the bytes between device and host memory in a step, if the state is in host memory.

    The weights and gradients are in float32, and move each time that weights are gathered or gradients are reduced.
    """
    if layout.trainer.memory.offload is None:
        return 0.0
    plan, weights = batch(layout), rank_weights(layout)
    gathers, of_ends = _gatherings(layout, plan)
    gathered = gathers * weights.held_blocks + of_ends * weights.ends / weights.ranks
    copied = reductions(layout, plan) if layout.degree(Dimension.replicate) == 1 else 1  # copies add up on the device
    return HELD * (gathered + copied * layout.trained_share * weights.held)


def _gatherings(layout: ParallelLayout, plan: BatchPlan) -> tuple[int, int]:
    """Return how often in a step the weights of blocks are gathered, and those of the ends."""
    parallelism, count = layout.parallelism, plan.microbatches
    free = frees_weights(layout.trainer, parallelism, layout.weights)
    if parallelism.pipeline == 1:
        return count * (2 if free else 1), count
    # The backward of each microbatch, and the forwards before the first of them.
    return count + min(count, parallelism.pipeline * parallelism.stages_per_rank) if free else 1, 1


def _of_weights(layout: ParallelLayout, plan: BatchPlan) -> list[Traffic]:
    count, weights = plan.microbatches, rank_weights(layout)
    gathers, of_ends = _gatherings(layout, plan)
    sums, trained = reductions(layout, plan), layout.trained_share

    def over(ranks: int, name: str, modules: int, blocks: float, ends: float) -> list[Traffic]:
        if ranks == 1:
            return []
        gathered = COMPUTED * (gathers * blocks + of_ends * ends)
        reduced = REDUCED * trained * sums * (blocks + ends)
        return [
            Traffic(Dimension.shard, f"all-gather of {name}", ranks, count * 2 * modules, gathered, False),
            Traffic(Dimension.shard, f"reduce-scatter of {name}' gradients", ranks, sums * modules, reduced, False),
        ]

    blocks, routed = stage_blocks(layout), routed_blocks(layout)
    parts = over(weights.ranks, "weights", blocks + 1, weights.blocks, weights.ends)
    if routed:
        parts += over(weights.expert_ranks, "experts", routed, weights.experts, 0.0)
    if (copies := layout.degree(Dimension.replicate)) > 1:
        size = REDUCED * trained * weights.held
        times = blocks + 1 + routed
        parts.append(Traffic(Dimension.replicate, "all-reduce of gradients", copies, times, size, False))
    return parts


def reductions(layout: ParallelLayout, plan: BatchPlan) -> int:
    """Return how often in a step gradients are added up over ranks."""
    parallelism = layout.parallelism
    return (
        plan.microbatches
        if parallelism.pipeline == 1 and frees_weights(layout.trainer, parallelism, layout.weights)
        else 1
    )


def _of_tensor_groups(layout: ParallelLayout, plan: BatchPlan, residual: float) -> list[Traffic]:
    """Return the traffic of tensor groups.

    A block with experts counts with its attention and its shared experts only. The gradients of routers are added, and
    for a stage the result of the embedding and the input of the output layer.
    """
    model, routed, overlapped = layout.trainer.model, routed_blocks(layout), layout.parallelism.async_tensor
    halves = 2 * stage_blocks(layout)
    routers = 0.0
    if model.experts is not None:
        halves -= 0 if model.experts.shared else routed
        routers = float(REDUCED * reductions(layout, plan) * routed * model.experts.count * model.dim)
    of_layers = plan.microbatches * halves * _gathers_of_half(layout.trainer.memory.resolved_activations, overlapped)
    of_ends = plan.microbatches * 4 / layout.parallelism.pipeline

    def part(name: str, collectives: float, extra_bytes: float, exposed: bool) -> Traffic:
        size = collectives * residual + extra_bytes
        return Traffic(Dimension.tensor, name, layout.parallelism.tensor, round(collectives), size, exposed)

    if not overlapped:
        return [part("gathers and reduce-scatters of activations", of_layers + of_ends, routers, True)]
    return [
        part("gathers and reduce-scatters within products", of_layers, 0.0, False),
        part("gathers and reduce-scatters at both ends", of_ends, routers, True),
    ]


def _gathers_of_half(activations: Activations, overlapped: bool) -> int:
    """Return the gatherings and reduce-scatters of an attention or a feed-forward.

    There is one of each in forward and backward, and again for what is recomputed. Overlapped ones gather their input
    once more. They are products, which may be kept.
    """
    is_recomputed = activations is Activations.recompute or (activations is Activations.products and not overlapped)
    return 4 + 2 * is_recomputed + overlapped


def _of_context_groups(layout: ParallelLayout, plan: BatchPlan) -> Traffic:
    model = layout.trainer.model
    kv = 2 * model.key_dim / layout.parallelism.tensor
    times = plan.microbatches * stage_blocks(layout) * 2
    whole = plan.rows * model.sequence_length * kv * COMPUTED
    return Traffic(Dimension.context, "keys and values", layout.parallelism.context, times, times * whole, True)


def _of_experts(layout: ParallelLayout, microbatches: int, residual: float) -> Traffic:
    """Return the traffic of tokens to their experts and back, and of the gradients of both.

    Loads are assumed to be even, so the traffic of each rank is the same.
    """
    experts = layout.trainer.model.experts
    assert experts is not None
    is_recomputed = layout.trainer.memory.resolved_activations is not Activations.keep
    times = microbatches * routed_blocks(layout) * (6 if is_recomputed else 4)
    return Traffic(
        DerivedGroup.expert, "tokens to experts and back", layout.parallelism.expert, times,
        times * experts.active_per_token * residual, True,
    )  # fmt: skip
