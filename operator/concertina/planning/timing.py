"""Seconds of a step, by a stated model (docs/planning.md); benchmarks/planning.py compares it with published runs."""

from __future__ import annotations

import dataclasses
import math

from concertina.planning.hardware import HOST_MEMORY_RATE, LATENCY, REACHED, Gpu
from concertina.planning.layout import DerivedGroup, Group, ParallelLayout
from concertina.planning.traffic import (
    COMPUTED,
    Traffic,
    batch,
    host_bytes,
    rank_weights,
    routed_blocks,
    stage_blocks,
    traffic,
)
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.parallelism import PipelineSchedule
from concertina_trainer.degrees import Dimension

AGAIN = {Activations.keep: 1.0, Activations.products: 1.0, Activations.recompute: 4 / 3}
"""Matrix products that are really computed, of those that are counted."""
PASSES, HIDDEN_PASSES = 200, 80
"""Numbers that a block's elementwise operations, each a kernel of its own, read and write for a token, forward and
backward: in units of dim, and of the feed-forward's width. Set by the published runs, as `Gpu.kernels` is."""
ROUTED_PASSES = 40
"""The same of each row that goes to an expert and back, in units of dim: counted in the code, not set by a run."""
COUNTED = 1.6
"""By which bytes that are counted, of models of one's own, are multiplied: of the decoder of 8 billion weights that the
published runs trained, the count is 0.63 of what these numbers give."""
LOGIT_BYTES = 30
"""Of each of a token's logits: in bfloat16 and in float32, the loss and its gradient."""
OPTIMIZER_BYTES = 28
"""Of each weight: it, its gradient and two moments are read, and all but the gradient written."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    compute: float
    communication: dict[Group, float]
    """What nothing hides."""
    bubble: float
    """That a rank waits for the other stages of its pipeline."""
    optimizer: float
    host: float
    """Copies between the device and host memory, as far as nothing hides them."""
    filling: float
    """Of `compute`: rows that hold nothing, since the batch does not divide."""

    @property
    def total(self) -> float:
        return self.compute + sum(self.communication.values()) + self.bubble + self.optimizer + self.host


def bubble_share(layout: ParallelLayout, microbatches: int) -> float:
    """Time that a rank waits in a step for its neighbours in the pipeline, as a part of what it computes: (P - 1) / m
    (arXiv 2104.04473), over the stages of a rank where they are interleaved; with zero bubble a third of that (arXiv
    2401.10241)."""
    waiting = (layout.parallelism.pipeline - 1) / microbatches / layout.parallelism.stages_per_rank
    return waiting / 3 if layout.parallelism.schedule is PipelineSchedule.zero_bubble else waiting


def link(layout: ParallelLayout, part: Traffic, gpu: Gpu, fabric: float) -> float:
    """Bytes a second that the rank sends by: rings over several nodes use the network of each GPU that a node has in
    the group."""
    if not layout.crosses(part.dimension):
        return gpu.nvlink * REACHED
    together = layout.on_node(part.dimension)
    if part.dimension is Dimension.shard:
        together *= layout.on_node(Dimension.context)
    if part.dimension is Dimension.pipeline:
        together = 1
    if part.dimension is DerivedGroup.expert:
        # Each rank sends by its own network what is for other nodes.
        return min(gpu.nvlink, fabric * (part.ranks - 1) / (part.ranks - together)) * REACHED
    return min(gpu.nvlink, together * fabric) * REACHED


def seconds_of(layout: ParallelLayout, part: Traffic, gpu: Gpu, fabric: float) -> float:
    return part.sent / link(layout, part, gpu, fabric) + part.times * LATENCY * math.log2(max(2, part.ranks))


def step_time(layout: ParallelLayout, gpu: Gpu, fabric: float) -> StepTime:
    """`fabric`: bytes a second of each GPU to other nodes."""
    trainer, model, given, plan = layout.trainer, layout.trainer.model, layout.parallelism, batch(layout)
    ranks = given.pipeline * given.context * given.tensor
    tokens = plan.microbatches * plan.rows * model.sequence_length / ranks
    products = tokens * layout.flops * AGAIN[trainer.memory.activations] / (gpu.flops * gpu.kernels)
    again = 4 / 3 if trainer.memory.activations is not Activations.keep else 1.0
    bytes_moved = tokens * moved(layout, again)
    compute = products + bytes_moved / gpu.memory_rate
    communication: dict[Group, float] = {}
    hidden: dict[Group, float] = {}
    for part in traffic(layout):
        seconds = seconds_of(layout, part, gpu, fabric)
        if part.dimension is Dimension.tensor and not part.exposed:
            communication[part.dimension] = _beyond_products(layout, seconds / part.times, gpu)
            continue
        into = communication if part.exposed else hidden
        into[part.dimension] = into.get(part.dimension, 0.0) + seconds

    def left(seconds: float) -> float:
        """Beside the computation, but for the first block's weights and the last one's gradients."""
        return max(0.0, seconds - compute) + min(seconds, compute) / (layout.blocks / given.pipeline + 1)

    for dimension, seconds in hidden.items():
        communication[dimension] = communication.get(dimension, 0.0) + left(seconds)
    within = (Dimension.tensor, Dimension.context, DerivedGroup.expert)
    busy = compute + sum(communication.get(each, 0.0) for each in within)
    bubble = busy * bubble_share(layout, plan.microbatches)
    rate = gpu.memory_rate if trainer.memory.offload is None else HOST_MEMORY_RATE
    optimizer = rank_weights(layout).held * layout.trained_share * OPTIMIZER_BYTES / rate
    host = left(host_bytes(layout) / (gpu.host_link * REACHED))
    return StepTime(compute, communication, bubble, optimizer, host, compute * (0.0 if plan.fixed else plan.filling))


def _beyond_products(layout: ParallelLayout, once: float, gpu: Gpu) -> float:
    """Seconds that tensor groups send within products and these do not hide, each gathering or reduction taking `once`:
    of a product in as many pieces as ranks each but one hides what is sent of another."""
    model, given, plan = layout.trainer.model, layout.parallelism, batch(layout)
    again = 1 + (layout.trainer.memory.activations is Activations.recompute)
    blocks, routed = stage_blocks(layout), routed_blocks(layout)
    shared = model.experts.shared * model.expert_dim if model.experts is not None else 0
    inner = [model.resolved_hidden_dim] * (blocks - routed) + [shared] * (routed if shared else 0)
    keys_and_values = 2 * model.resolved_kv_heads * (model.dim // model.heads)
    tokens = plan.rows * model.sequence_length / given.context

    def left(sent: int, width: int) -> float:
        product = 2 * tokens * model.dim * width / given.tensor / (gpu.flops * gpu.kernels)
        return max(0.0, sent * once - product * (1 - 1 / given.tensor))

    found = 0.0
    for columns, rows in [(model.dim + keys_and_values, model.dim)] * blocks + [(2 * each, each) for each in inner]:
        # In the backward a layer's input is gathered once more, beside the product that its gradient comes from.
        found += again * left(1, columns) + left(2, columns) + (again + 1) * left(1, rows)
    return plan.microbatches * found


def moved(layout: ParallelLayout, again: float) -> float:
    """Bytes that all other operations than products read and write for a token. `again`: so often what can be computed
    again is."""
    if layout.own is not None:
        return layout.own.moved * again * COUNTED
    model = layout.trainer.model
    return _moved_in_blocks(model) * again + LOGIT_BYTES * model.vocab_size


def _moved_in_blocks(model: ModelConfig) -> float:
    plain = (model.layers - model.routed_layers) * model.resolved_hidden_dim
    numbers = model.layers * PASSES * model.dim + HIDDEN_PASSES * plain
    if model.experts is not None:
        rows, width = model.experts.active_per_token, model.token_width
        numbers += model.routed_layers * (HIDDEN_PASSES * width + ROUTED_PASSES * rows * model.dim)
    return float(numbers * COMPUTED)


def mfu(layout: ParallelLayout, gpu: Gpu, seconds: float) -> float:
    """Operations that the model needs, over what the GPUs could in that time."""
    trainer = layout.trainer
    flops = trainer.global_batch_size * trainer.model.sequence_length * layout.flops
    return flops / (seconds * layout.size * gpu.flops)
