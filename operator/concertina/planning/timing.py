"""Time of a step, estimated with the model in notebook/planner.md.

benchmarks/planning.py compares the estimates with published runs.
"""

from __future__ import annotations

import dataclasses
import math

from concertina.planning import muon
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
"""Ratio of computed matrix products to necessary ones, for each mode of activation memory."""
PASSES, HIDDEN_PASSES = 200, 80
"""Memory accesses by the elementwise operations of a block, per token, in the forward and the backward pass together.

A token reads or writes PASSES * dim + HIDDEN_PASSES * (width of the feed-forward layer) numbers. Each operation is
assumed to be a separate kernel. Both values were fitted to the published runs, like `Gpu.kernels`.
"""
ROUTED_PASSES = 40
"""Memory accesses for each row that is sent to an expert and back, as a multiple of dim.

The value was counted in the code. It was not fitted to a run.
"""
COUNTED = 1.6
"""Factor by which the counted memory traffic of a custom model is multiplied.

For the 8-billion-parameter decoder of the published runs, the counted bytes are 0.63 (about 1 / 1.6) of the bytes that
follow from the fitted factors.
"""
LOGIT_BYTES = 28
"""Bytes of memory traffic for each logit of a token.

They consist of one read in bfloat16, three passes in float32, and the gradient in bfloat16.
"""
WEIGHT_BYTES = 12
"""Bytes of memory traffic for each weight in an optimizer update: the weight is read and written, its gradient is read.
"""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Time of a step in seconds, by kind."""

    compute: float
    communication: dict[Group, float]
    """Seconds of communication that do not overlap with computation."""
    bubble: float
    """Seconds for which a rank waits for other pipeline stages."""
    optimizer: float
    host: float
    """Seconds of copies between device and host memory that do not overlap with computation."""
    filling: float
    """Seconds of `compute` that are spent on padding rows, which exist if the batch size is not divisible by the ranks.
    """

    @property
    def total(self) -> float:
        return self.compute + sum(self.communication.values()) + self.bubble + self.optimizer + self.host


def bubble_share(layout: ParallelLayout, microbatches: int) -> float:
    """Return the ratio of the time for which a rank waits for other pipeline stages to the time for which it computes.

    For P stages and m microbatches, the ratio is (P - 1) / m (arXiv 2104.04473). An interleaved schedule divides it by
    the number of stages per rank. A zero-bubble schedule also divides it by 3 (arXiv 2401.10241).
    """
    waiting = (layout.parallelism.pipeline - 1) / microbatches / layout.parallelism.stages_per_rank
    return waiting / 3 if layout.parallelism.schedule is PipelineSchedule.zero_bubble else waiting


def link(layout: ParallelLayout, part: Traffic, gpu: Gpu, fabric: float) -> float:
    """Return the rate, in bytes per second, at which a rank sends the traffic `part`.

    If the group's ring spans several nodes, each node uses the network links of all its GPUs in the group.
    """
    if not layout.crosses(part.dimension):
        return gpu.nvlink * REACHED
    together = layout.on_node(part.dimension)
    if part.dimension is Dimension.shard:
        together *= layout.on_node(Dimension.context)
    if part.dimension is Dimension.pipeline:
        together = 1
    if part.dimension is DerivedGroup.expert:
        # Each rank uses its own network link for data to other nodes.
        return min(gpu.nvlink, fabric * (part.ranks - 1) / (part.ranks - together)) * REACHED
    return min(gpu.nvlink, together * fabric) * REACHED


def seconds_of(layout: ParallelLayout, part: Traffic, gpu: Gpu, fabric: float) -> float:
    return part.sent / link(layout, part, gpu, fabric) + part.times * LATENCY * math.log2(max(2, part.ranks))


def step_time(layout: ParallelLayout, gpu: Gpu, fabric: float) -> StepTime:
    """Return the estimated time of a step.

    `fabric` is the rate, in bytes per second, from each GPU to other nodes.
    """
    trainer, model, parallelism, plan = layout.trainer, layout.trainer.model, layout.parallelism, batch(layout)
    ranks = parallelism.pipeline * parallelism.context * parallelism.tensor
    tokens = plan.microbatches * plan.rows * model.sequence_length / ranks
    products = tokens * layout.flops * AGAIN[trainer.memory.resolved_activations] / (gpu.flops * gpu.kernels)
    recompute_factor = 4 / 3 if trainer.memory.resolved_activations is not Activations.keep else 1.0
    bytes_moved = tokens * moved(layout, recompute_factor)
    compute = products + bytes_moved / gpu.memory_rate
    communication: dict[Group, float] = {}
    hidden: dict[Group, float] = {}
    for part in traffic(layout):
        seconds = seconds_of(layout, part, gpu, fabric)
        if part.dimension is Dimension.tensor and not part.exposed:
            communication[part.dimension] = _beyond_products(layout, seconds / part.times, gpu)
            continue
        seconds_by_dimension = communication if part.exposed else hidden
        seconds_by_dimension[part.dimension] = seconds_by_dimension.get(part.dimension, 0.0) + seconds

    def unhidden_seconds(seconds: float) -> float:
        """Return the seconds that do not overlap with computation.

        The gathering of the first block's weights and the reduction of the last gradients can't overlap with
        computation.
        """
        return max(0.0, seconds - compute) + min(seconds, compute) / (layout.blocks / parallelism.pipeline + 1)

    for dimension, seconds in hidden.items():
        communication[dimension] = communication.get(dimension, 0.0) + unhidden_seconds(seconds)
    inner_groups = (Dimension.tensor, Dimension.context, DerivedGroup.expert)
    busy = compute + sum(communication.get(group, 0.0) for group in inner_groups)
    bubble = busy * bubble_share(layout, plan.microbatches)
    rate = gpu.memory_rate if trainer.memory.offload is None else HOST_MEMORY_RATE
    bytes_per_weight = WEIGHT_BYTES + 2 * layout.moment_bytes  # moments are read and written
    optimizer = rank_weights(layout).held * layout.trained_share * bytes_per_weight / rate
    optimizer += sum(seconds_of(layout, part, gpu, fabric) for part in muon.traffic(layout))
    optimizer += muon.flops(layout) / (gpu.precise_flops * gpu.kernels)
    host = unhidden_seconds(host_bytes(layout) / (gpu.host_link * REACHED))
    return StepTime(compute, communication, bubble, optimizer, host, compute * (0.0 if plan.fixed else plan.filling))


def _beyond_products(layout: ParallelLayout, once: float, gpu: Gpu) -> float:
    """Return the seconds of a tensor group's communication that do not overlap with matrix products.

    Each all-gather or reduce-scatter takes `once` seconds. Each matrix product is computed in as many pieces as the
    group has ranks. The computation of each piece except the
    first overlaps with the transfer of another piece.
    """
    model, parallelism, plan = layout.trainer.model, layout.parallelism, batch(layout)
    forward_passes = 1 + (layout.trainer.memory.resolved_activations is Activations.recompute)
    blocks, routed = stage_blocks(layout), routed_blocks(layout)
    inner = [model.resolved_hidden_dim] * (blocks - routed) + [model.shared_width] * (
        routed if model.shared_width else 0
    )
    tokens = plan.rows * model.sequence_length / parallelism.context

    def unhidden_seconds(sent: int, width: int) -> float:
        product = 2 * tokens * model.dim * width / parallelism.tensor / (gpu.flops * gpu.kernels)
        return max(0.0, sent * once - product * (1 - 1 / parallelism.tensor))

    microbatch_seconds = 0.0
    for columns, rows in [(model.query_dim + 2 * model.key_dim, model.query_dim)] * blocks + [
        (2 * width_of_layer, width_of_layer) for width_of_layer in inner
    ]:
        # In the backward pass, a layer's input is gathered once more, during the product that computes its gradient.
        microbatch_seconds += (
            forward_passes * unhidden_seconds(1, columns)
            + unhidden_seconds(2, columns)
            + (forward_passes + 1) * unhidden_seconds(1, rows)
        )
    return plan.microbatches * microbatch_seconds


def moved(layout: ParallelLayout, recompute_factor: float) -> float:
    """Return the bytes per token that a rank reads and writes in GPU memory, without matrix products.

    `recompute_factor` multiplies the bytes of the operations that activation recomputation may repeat.
    """
    if layout.own is not None:
        return layout.own.moved * recompute_factor * COUNTED
    model = layout.trainer.model
    return _moved_in_blocks(model) * recompute_factor + LOGIT_BYTES * model.vocab_size


def _moved_in_blocks(model: ModelConfig) -> float:
    plain = (model.layers - model.routed_layers) * model.resolved_hidden_dim
    numbers = model.layers * PASSES * model.dim + HIDDEN_PASSES * plain
    if model.experts is not None:
        rows, width = model.experts.active_per_token, model.token_width
        numbers += model.routed_layers * (HIDDEN_PASSES * width + ROUTED_PASSES * rows * model.dim)
    return float(numbers * COMPUTED)


def mfu(layout: ParallelLayout, gpu: Gpu, seconds: float) -> float:
    """Return the model FLOPs utilization, from 0 to 1, for a step time in seconds.

    It is the ratio of the operations that the model needs to those that the GPUs could do in this time.
    """
    return _utilization(layout, gpu, seconds, layout.flops)


def hfu(layout: ParallelLayout, gpu: Gpu, seconds: float) -> float | None:
    """Return the hardware FLOPs utilization, which also counts the operations that activation checkpointing repeats.

    The result is None if the number of these operations is not known.
    """
    if layout.recomputed_flops is None:
        return None
    return _utilization(layout, gpu, seconds, layout.flops + layout.recomputed_flops)


def _utilization(layout: ParallelLayout, gpu: Gpu, seconds: float, flops: float) -> float:
    """Return the fraction of the GPUs' peak rate that a step uses.

    Args:
        layout: Layout of the job.
        gpu: GPU of each rank.
        seconds: Duration of the step.
        flops: Floating-point operations for one element of a sequence.
    """
    trainer = layout.trainer
    elements = trainer.global_batch_size * trainer.model.sequence_length
    return elements * flops / (seconds * layout.size * gpu.flops)
