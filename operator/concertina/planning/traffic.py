"""Bytes that one rank's collectives move in a step, by dimension: formulas of how the bundled trainer is cut.

tests/train/trainer/test_planning.py counts the same in the trainer's own code."""

from __future__ import annotations

import dataclasses
import math

from concertina.planning.layout import Layout
from concertina_trainer.config.memory import Activations
from concertina_trainer.data.read.batch import BatchPlan, batch_plan
from concertina_trainer.degrees import Dimension
from concertina_trainer.layouts import frees_weights

COMPUTED, REDUCED = 2, 4
"""Bytes of a number: weights and activations travel in bfloat16, gradients in float32."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    dimension: Dimension
    """`shard` is FSDP's, over context groups too."""
    name: str
    ranks: int
    """Of the group."""
    times: int
    """Collectives in a step."""
    bytes: float
    """What is gathered, reduced or sent, in a step."""
    exposed: bool
    """Whether nothing is computed meanwhile."""

    @property
    def sent(self) -> float:
        """Bytes that leave the rank, by the algorithms of a ring (an all-reduce is a reduce-scatter and an
        all-gather)."""
        if self.dimension is Dimension.pipeline:
            return self.bytes
        part = (self.ranks - 1) / self.ranks
        return self.bytes * part * (2 if self.dimension is Dimension.replicate else 1)


def batch(layout: Layout) -> BatchPlan:
    return batch_plan(layout.trainer, layout.degrees)


def stage_blocks(layout: Layout) -> int:
    """Most blocks of a rank."""
    return math.ceil(layout.trainer.model.layers / layout.parallelism.pipeline)


def rank_weights(layout: Layout) -> float:
    """Most weights of a rank's blocks and what comes before or after them, as tensor parallelism leaves them whole."""
    model, given = layout.trainer.model, layout.parallelism
    embedding = model.vocab_size * model.dim
    ends = embedding * (2 if given.pipeline == 1 and not model.tie_embeddings else 1)
    return (stage_blocks(layout) * model.block_weights + ends) / given.tensor


def traffic(layout: Layout) -> list[Traffic]:
    model, given, plan = layout.trainer.model, layout.parallelism, batch(layout)
    count, blocks = plan.microbatches, stage_blocks(layout)
    tokens = plan.rows * model.sequence_length / given.context
    residual = tokens * model.dim * COMPUTED
    found: list[Traffic] = []
    times: float
    fsdp = layout.degree(Dimension.shard) * given.context
    free = frees_weights(layout.trainer, given)
    weights = rank_weights(layout)
    if fsdp > 1:
        in_blocks = blocks * model.block_weights / given.tensor
        ends = weights - in_blocks
        if given.pipeline == 1:
            gathered = count * (in_blocks * (2 if free else 1) + ends)
        else:  # the backward of each microbatch, and the forwards before the first of them
            times = count + min(count, given.pipeline * given.stages_per_rank) if free else 1
            gathered = times * in_blocks + ends
        reductions = count if free and given.pipeline == 1 else 1
        found += [
            Traffic(
                Dimension.shard, "all-gather of weights", fsdp, count * 2 * (blocks + 1), COMPUTED * gathered, False
            ),
            Traffic(
                Dimension.shard,
                "reduce-scatter of gradients",
                fsdp,
                reductions * (blocks + 1),
                REDUCED * weights * reductions,
                False,
            ),
        ]
    if (copies := layout.degree(Dimension.replicate)) > 1:
        found.append(
            Traffic(Dimension.replicate, "all-reduce of gradients", copies, blocks + 1, REDUCED * weights / fsdp, False)
        )
    if given.tensor > 1:
        again = layout.trainer.memory.activations is not Activations.keep
        collectives = count * (blocks * (12 if again else 8) + 4 / given.pipeline)
        found.append(
            Traffic(
                Dimension.tensor, "gathers and reduce-scatters of activations", given.tensor, round(collectives),
                collectives * residual, True,
            )
        )  # fmt: skip
    if given.context > 1:
        kv = 2 * model.resolved_kv_heads * (model.dim // model.heads) / given.tensor
        whole = plan.rows * model.sequence_length * kv * COMPUTED
        times = count * blocks * 2
        found.append(
            Traffic(Dimension.context, "keys and values", given.context, times, times * whole, True)
        )  # fmt: skip
    if given.pipeline > 1:
        times = count * (2 * given.stages_per_rank - 1)
        found.append(
            Traffic(
                Dimension.pipeline, "activations and their gradients", 2, times, times * residual / given.tensor, False
            )
        )
    return found
