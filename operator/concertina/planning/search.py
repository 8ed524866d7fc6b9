"""Search for good layouts of a job on a given number of GPUs, ordered by speed, the fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from concertina.planning.hardware import Gpu
from concertina.planning.layout import OwnDescription, ParallelLayout
from concertina.planning.timing import step_time
from concertina.planning.traffic import COMPUTED, HELD, REDUCED, batch, rank_weights, reductions, stage_blocks
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.parallelism import ParallelismConfig, PipelineSchedule
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.layouts import problems

DEEPEST, LONGEST = 16, 16
"""Largest number of pipeline stages, and largest size of a context group, that the search tries.

Published runs do not exceed them.
"""


def candidates(
    trainer: TrainerConfig, gpu: Gpu, fabric: float, size: int, per_node: int, own: OwnDescription | None = None
) -> list[ParallelLayout]:
    """Return all layouts that the trainer supports and that may fit into memory, the fastest first.

    The batch and the model come from `trainer`. The parallelism in the job's spec and `memory.activations` of `trainer`
    are ignored: the search tries all of their values.
    """
    timed_layouts = [
        (step_time(layout, gpu, fabric).total, number, layout)
        for number, layout in enumerate(_layouts(trainer, size, per_node, own))
        if least_memory(layout) <= gpu.usable
    ]
    return [layout for _, _, layout in sorted(timed_layouts)]


def _layouts(trainer: TrainerConfig, size: int, per_node: int, own: OwnDescription | None) -> Iterator[ParallelLayout]:
    activation_modes = [Activations.keep] if own and not own.blocks else list(Activations)
    # Only FSDP can shard a custom model.
    tensors = _divisors(1 if own else per_node)
    pipelines, contexts = ([n for n in _divisors(1 if own else size) if n <= limit] for limit in (DEEPEST, LONGEST))
    experts = _divisors(trainer.model.experts.count) if trainer.model.experts else [1]
    for tensor, pipeline, context in itertools.product(tensors, pipelines, contexts):
        if size % (tensor * pipeline * context):
            continue
        data = size // (tensor * pipeline * context)
        schedules = list(PipelineSchedule) if pipeline > 1 else [PipelineSchedule.one_f_one_b]
        # The state is sharded over all ranks, over the ranks of one node, or over the ranks of eight nodes.
        shards = {None, *(n for n in (max(1, per_node // tensor), 8 * per_node // tensor) if 0 < n < data)}
        for schedule, shard, expert in itertools.product(schedules, sorted(shards, key=lambda n: n or 0), experts):
            parallelism = ParallelismConfig(
                tensor=tensor, pipeline=pipeline, context=context, schedule=schedule, shard=shard, expert=expert
            )
            if problems(trainer, parallelism, size) or trainer.global_batch_size < data:
                continue
            for activations in activation_modes:
                memory = trainer.memory.model_copy(update={"activations": activations})
                yield ParallelLayout(trainer.model_copy(update={"memory": memory}), parallelism, size, per_node, own)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def least_memory(layout: ParallelLayout) -> float:
    """Return a lower bound of the bytes of GPU memory that a rank needs.

    If a GPU has less memory than this bound, the layout can't run on it. The bytes of the training state are exact. For
    the decoder's activations, the bound counts only the memory that every pipeline schedule needs.
    """
    model, parallelism, plan = layout.trainer.model, layout.parallelism, batch(layout)
    weights = rank_weights(layout)
    held_weights = weights.held if layout.trainer.memory.offload is None else 0.0
    gradients = weights.whole if plan.microbatches > reductions(layout, plan) else held_weights
    moments = layout.moment_bytes * held_weights
    state = HELD * held_weights + layout.trained_share * (moments + REDUCED * gradients)
    if layout.own is not None:
        return state
    tokens = plan.rows * model.sequence_length / parallelism.context / parallelism.tensor
    width = {
        Activations.keep: 8 * model.dim + 4 * model.token_width,
        Activations.products: 4 * model.dim + 2 * model.token_width,
        Activations.recompute: model.dim,
    }[layout.trainer.memory.resolved_activations]
    waiting = (
        plan.microbatches
        if parallelism.schedule is PipelineSchedule.gpipe
        else min(plan.microbatches, parallelism.pipeline)
    )
    activations = tokens * width * COMPUTED * stage_blocks(layout) * (waiting if parallelism.pipeline > 1 else 1)
    return state + activations
