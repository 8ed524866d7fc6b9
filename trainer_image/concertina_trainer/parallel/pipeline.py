"""Pipeline parallelism by torch.distributed.pipelining: each rank computes some layers for every microbatch.

Sources of the schedules: GPipe, arXiv 1811.06965; 1F1B, arXiv 1806.03377; interleaved, arXiv 2104.04473; zero bubble,
arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from concertina_protocol import StepPart
from concertina_trainer.config.parallelism import PipelineSchedule
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan
from concertina_trainer.model.optimizer import local
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.shard import compute_dtype
from concertina_trainer.parallel.step_times import StepTimes

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
SCHEDULES: dict[PipelineSchedule, Callable[..., Schedule]] = {
    PipelineSchedule.gpipe: ScheduleGPipe,
    PipelineSchedule.one_f_one_b: Schedule1F1B,
    PipelineSchedule.interleaved: ScheduleInterleaved1F1B,
    PipelineSchedule.zero_bubble: ScheduleInterleavedZeroBubble,
}


class MeasuredStage(PipelineStage):
    """Pipeline stage that measures the time of its computation.

    In the rest of a step, the stage waits for other stages.
    """

    times: StepTimes

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self.times.measured(StepPart.FORWARD):
            return super().forward_one_chunk(*arguments, **keywords)

    def backward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self.times.measured(StepPart.BACKWARD):
            return super().backward_one_chunk(*arguments, **keywords)

    def backward_weight_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self.times.measured(StepPart.BACKWARD):
            return super().backward_weight_one_chunk(*arguments, **keywords)


def schedule(model: Stages, config: TrainerConfig, plan: BatchPlan, world: DistContext) -> Schedule:
    """Return the schedule that runs the microbatches of a step through the pipeline stages.

    The shapes of the tensors between stages are passed to torch. Without them, torch would determine the shapes by an
    additional step in each round.
    """
    mesh, degrees, kind = world.meshes.pipeline, world.degrees, world.parallelism.schedule
    assert mesh is not None
    count = degrees.pipeline * kind.stages
    length = config.model.sequence_length // degrees.context
    tokens = torch.empty(plan.rows, length, dtype=torch.int64, device=world.device)
    between = torch.empty(
        plan.rows, length // degrees.tensor, config.model.dim, device=world.device,
        dtype=compute_dtype(config.precision, world.device), requires_grad=True,
    )  # fmt: skip
    loss = torch.empty((), device=world.device, requires_grad=True)
    stages = [
        MeasuredStage(
            part,
            mesh.get_local_rank() + i * degrees.pipeline,
            count,
            world.device,
            input_args=tokens if part.part.first else between,
            output_args=loss if part.part.last else between,
            group=mesh.get_group(),
        )
        for i, part in enumerate(model.parts)
    ]
    for stage in stages:
        stage.times = world.times
    return SCHEDULES[kind](
        stages if kind.stages > 1 else stages[0], plan.microbatches, loss_fn=_as_computed, scale_grads=False
    )


def _as_computed(loss: Tensor, target: None) -> Tensor:
    """Return the loss unchanged, because the model of the last stage has already computed it."""
    return loss


def sum_tied(model: Stages, world: DistContext) -> None:
    """Sum the gradients of tied embeddings.

    The first and the last pipeline stage each have a copy of such an embedding.

    The ranks of the two stages exchange their gradients, and each adds the other's gradient to its own. Both therefore
    get the same bits.
    """
    mesh = world.meshes.pipeline
    assert mesh is not None
    embeddings = (p for part in model.parts for name, p in part.named_parameters() if name == "embedding.weight")
    own_embeddings = [p for p in embeddings if p.requires_grad]
    if not own_embeddings:
        return
    [parameter] = own_embeddings
    assert parameter.grad is not None
    ranks = dist.get_process_group_ranks(mesh.get_group())
    peer = ranks[-1] if world.rank == ranks[0] else ranks[0]
    gradient = local(parameter.grad)
    sent = gradient.to(world.device).contiguous()  # it may be in host memory, which NCCL does not send
    received = torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient.add_(received.to(gradient.device))
