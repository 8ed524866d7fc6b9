"""Bytes that the collectives of one rank send in a step, by dimension.

The formulas follow how the bundled trainer shards the model. tests/train/trainer/test_planning.py compares them with
counts from the trainer's own code.
"""

from __future__ import annotations

import dataclasses
import math

from concertina.planning.layout import DerivedGroup, Group, ParallelLayout
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.optimizer_config import StatePrecision
from concertina_trainer.data.read.batch import BatchPlan, batch_plan
from concertina_trainer.degrees import Dimension
from concertina_trainer.layouts import frees_weights, reduces_each

COMPUTED, REDUCED, HELD = 2, 4, 4
"""Bytes per number: in transfers of weights and activations, in gradient reductions, and in the stored weights.

Transfers are in bfloat16. Gradients and stored weights are in float32.
"""


@dataclasses.dataclass(frozen=True)
class Traffic:
    dimension: Group
    """Dimension of the group whose ranks communicate.

    The group of `shard` is the FSDP group, which includes context groups. For experts, it also includes tensor groups.
    """
    name: str
    ranks: int
    """Number of ranks in the group."""
    times: int
    """Number of collectives in a step."""
    bytes: float
    """Bytes of data that the collectives gather, reduce or send in a step.

    `sent` are the bytes that one rank sends for this.
    """
    exposed: bool
    """True if the collectives do not overlap with computation."""

    @property
    def sent(self) -> float:
        """Bytes that the rank sends in a step for this traffic, with ring algorithms.

        An all-reduce consists of a reduce-scatter and an all-gather.
        """
        if self.dimension is Dimension.pipeline:
            return self.bytes
        part = (self.ranks - 1) / self.ranks
        return self.bytes * part * (2 if self.dimension is Dimension.replicate else 1)


def batch(layout: ParallelLayout) -> BatchPlan:
    return batch_plan(layout.trainer, layout.degrees)


def stage_blocks(layout: ParallelLayout) -> int:
    """Return the number of transformer blocks of the rank that has the most."""
    return math.ceil(layout.blocks / layout.parallelism.pipeline)


def routed_blocks(layout: ParallelLayout) -> int:
    """Return how many of the blocks of the rank with the most blocks (`stage_blocks`) have experts."""
    return min(stage_blocks(layout), layout.trainer.model.routed_layers)


@dataclasses.dataclass(frozen=True)
class RankWeights:
    """Numbers of weights that FSDP shards, of the rank with the most weights.

    Each number counts the weights before FSDP shards them. Only tensor, expert and pipeline parallelism have divided
    them.
    """

    blocks: float
    ends: float
    """Weights outside the blocks: the embedding or the output layer, or both."""
    experts: float
    ranks: int
    """Number of ranks over which all weights except experts are sharded."""
    expert_ranks: int
    """Number of ranks over which the weights of the same experts are sharded."""

    @property
    def held(self) -> float:
        """Number of weights in the FSDP shards that the rank stores."""
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
    # Tensor parallelism does not divide routers.
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
    """Return the bytes that one rank copies between device and host memory in a step; 0 without offloading.

    Weights and gradients are copied in float32. Weights are copied for each all-gather, and gradients for each
    reduction.
    """
    if layout.trainer.memory.offload is None:
        return 0.0
    plan, weights = batch(layout), rank_weights(layout)
    gathers, of_ends = _gatherings(layout, plan)
    gathered = gathers * weights.held_blocks + of_ends * weights.ends / weights.ranks
    # Replicas of the state are summed on the device.
    copied = reductions(layout, plan) if layout.degree(Dimension.replicate) == 1 else 1
    return HELD * (gathered + copied * layout.trained_share * weights.held)


def _gatherings(layout: ParallelLayout, plan: BatchPlan) -> tuple[int, int]:
    """Return the number of all-gathers in a step for the weights of a block, and the number for other weights."""
    parallelism, count = layout.parallelism, plan.microbatches
    free = frees_weights(layout.trainer, parallelism, layout.weights)
    if parallelism.pipeline == 1:
        return count * (2 if free else 1), count
    # One for the backward pass of each microbatch, and one for each forward pass before the first backward pass.
    return count + min(count, parallelism.pipeline * parallelism.stages_per_rank) if free else 1, 1


def _of_weights(layout: ParallelLayout, plan: BatchPlan) -> list[Traffic]:
    count, weights = plan.microbatches, rank_weights(layout)
    gathers, of_ends = _gatherings(layout, plan)
    sums, trained = reductions(layout, plan), layout.trained_share
    rounded = layout.trainer.gradient_precision is StatePrecision.bfloat16
    gradient = COMPUTED if rounded else REDUCED

    def over(ranks: int, name: str, modules: int, blocks: float, ends: float) -> list[Traffic]:
        if ranks == 1:
            return []
        gathered = COMPUTED * (gathers * blocks + of_ends * ends)
        reduced = gradient * trained * sums * (blocks + ends)
        return [
            Traffic(Dimension.shard, f"all-gather of {name}", ranks, count * 2 * modules, gathered, False),
            Traffic(Dimension.shard, f"reduce-scatter of {name}' gradients", ranks, sums * modules, reduced, False),
        ]

    blocks, routed = stage_blocks(layout), routed_blocks(layout)
    parts = over(weights.ranks, "weights", blocks + 1, weights.blocks, weights.ends)
    if routed:
        parts += over(weights.expert_ranks, "experts", routed, weights.experts, 0.0)
    if (copies := layout.degree(Dimension.replicate)) > 1:
        exchanges = sums if rounded else 1
        size = gradient * trained * exchanges * weights.held
        times = exchanges * (blocks + 1 + routed)
        parts.append(Traffic(Dimension.replicate, "all-reduce of gradients", copies, times, size, False))
    return parts


def reductions(layout: ParallelLayout, plan: BatchPlan) -> int:
    """Return how many times each gradient is reduced over the ranks in a step."""
    each = reduces_each(layout.trainer, layout.parallelism, layout.weights)
    return plan.microbatches if each else 1


def _of_tensor_groups(layout: ParallelLayout, plan: BatchPlan, residual: float) -> list[Traffic]:
    """Return the traffic of a rank within its tensor group in a step.

    In a block with experts, only attention and shared experts use tensor parallelism. The result includes the gradients
    of the experts' routers. It also includes the embedding's output and the output layer's input, averaged over the
    pipeline stages.
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
    """Return the number of all-gathers and reduce-scatters of one attention or feed-forward layer for a microbatch.

    The forward pass has one all-gather and one reduce-scatter, and so has the backward pass. Recomputation repeats
    those of the forward pass. If matrix products are `overlapped` with communication, the backward pass gathers the
    layer's input once more. With the value `products` of `activations`, the results are stored and not gathered again.
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
    """Return the traffic that sends tokens to their experts, returns the results, and does the same for gradients.

    Tokens are assumed to be evenly distributed over the experts, so all ranks have the same traffic.
    """
    experts = layout.trainer.model.experts
    assert experts is not None
    is_recomputed = layout.trainer.memory.resolved_activations is not Activations.keep
    times = microbatches * routed_blocks(layout) * (6 if is_recomputed else 4)
    return Traffic(
        DerivedGroup.expert, "tokens to experts and back", layout.parallelism.expert, times,
        times * experts.active_per_token * residual, True,
    )  # fmt: skip
