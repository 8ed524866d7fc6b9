"""Peak memory of one rank, and the bytes that the rank communicates in a step.

The trainer's own code (the division of the model, the engine and the optimizer) runs under fake tensors. To save time,
models with two small numbers of blocks are run, and the results are extrapolated linearly to the real number. This
works because each block adds the same amount at a peak, whatever the number of blocks. For pipeline schedules whose
memory grows with the number of microbatches, this number is extrapolated in the same way. A custom model is run whole,
because the trainer can't leave out some of its blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from unittest import mock

from concertina_trainer.config.memory_config import Offload
from concertina_trainer.config.parallelism import ParallelismConfig, PipelineSchedule
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import BatchPlan, batch_plan
from concertina_trainer.degrees import Degrees
from concertina_trainer.model.decoder import StageLayers
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.model.own import OwnSpec, loaded
from concertina_trainer.model.stages import Stages, divided
from concertina_trainer.parallel import parallelize, summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.tensor import measured_waits
from concertina_trainer.planning.described_model import HERE, DataDescription, as_on_gpus, microbatch, running
from concertina_trainer.planning.fake import fake_rank, fake_tensors, norms_of_cuda, zeros_where_looked_at
from concertina_trainer.planning.ledger import Ledger, MemoryKind, MemoryPhase
from concertina_trainer.training.engine import engine_of

DEPTHS = (3, 4)
"""Numbers of blocks in a stage with which the model is run.

With fewer blocks, FSDP would have less memory in use at once: weights that it gathers ahead, and gradients that it
reduces.
"""
MICROBATCHES = 2
"""Number of microbatches with which the model is run.

From the second microbatch on, the gradients of previous ones are in memory. More microbatches do not change the peak.
"""


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank, and the bytes that the rank communicates in a step."""

    rank: int
    peaks: Mapping[MemoryPhase, Mapping[MemoryKind, float]]
    """Bytes by kind at the peak of each phase, on the device."""
    sent: Mapping[str, float]
    """Bytes of collectives, keyed by dimension of parallelism and operation, such as `fsdp all-gather`."""
    host: Mapping[MemoryKind, float]
    """Bytes of the state in host memory, keyed by kind."""

    @property
    def peak(self) -> Mapping[MemoryKind, float]:
        return max(self.peaks.values(), key=lambda kinds: sum(kinds.values()))


def stages_of(config: TrainerConfig, parallelism: ParallelismConfig) -> list[StageLayers]:
    return divided(config.model, parallelism.pipeline * parallelism.stages_per_rank)


def fullest(config: TrainerConfig, parallelism: ParallelismConfig, size: int) -> list[int]:
    """Return a few ranks, one of which has the highest peak of all ranks.

    The peak of a rank depends only on its position in the pipeline. A rank can be left out if another rank has at least
    as much of the model, and at least as many microbatches that wait for their backward pass. The first ranks of a
    pipeline have the most waiting microbatches. With a zero-bubble schedule, the last ranks have the most waiting
    microbatches, because microbatches also wait for the gradients of weights.
    """
    degrees = Degrees.of(parallelism, size)
    parts = stages_of(config, parallelism)
    has = [_contents(config, parts[position :: degrees.pipeline]) for position in range(degrees.pipeline)]
    chosen: list[int] = []
    for position in sorted(range(degrees.pipeline), reverse=parallelism.backward_in_halves):
        if not any(all(map(operator.ge, has[chosen_position], has[position])) for chosen_position in chosen):
            chosen.append(position)
    return [position * degrees.context * degrees.tensor for position in sorted(chosen)]


def _contents(config: TrainerConfig, stages: Sequence[StageLayers]) -> list[int]:
    """Return numbers that describe the contents of a rank's pipeline stages, one stage after another.

    Each stage has four numbers: blocks with experts, blocks without, and 1 or 0 for the embedding and for the output
    layer.
    """
    counts = []
    for part in stages:
        routed = sum(map(config.model.routed, part.blocks))
        counts += [routed, len(part.blocks) - routed, part.first, part.last]
    return counts


def memory(
    config: TrainerConfig, parallelism: ParallelismConfig, size: int, rank: int, data: DataDescription | None = None
) -> RankMemory:
    """Return the peak memory of one rank.

    `data` describes the data of a custom model, and is None for the decoder.

    Raises:
        InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`), or
            when a custom model can't be run.
    """
    degrees = Degrees.of(parallelism, size)
    if data is not None:
        loaded(str(config.model.custom), HERE)  # tensors that it makes at import stay real
        return _run(config, parallelism, size, rank, 0, batch_plan(config, degrees), data)
    pipeline_rank = degrees.place(rank).pipeline
    # All layers without experts are run, because a model with experts has only a few of them.
    stages = stages_of(config, parallelism)[pipeline_rank :: degrees.pipeline]
    blocks = [sum(map(config.model.routed, part.blocks)) or len(part.blocks) for part in stages]
    plan = batch_plan(config, degrees)
    # The same number of blocks is left out of all stages of a rank. Otherwise the peak could occur at another time.
    shallow = min(blocks)

    def run_at(depth: int, count: int) -> RankMemory:
        return _run(config, parallelism, size, rank, shallow - depth, dataclasses.replace(plan, microbatches=count))

    return _extended(rank, _points(shallow, plan.microbatches, parallelism), run_at)


def _points(depth: int, microbatches: int, parallelism: ParallelismConfig) -> dict[tuple[int, int], float]:
    """Return pairs of a number of blocks and a number of microbatches to run, each with a weight.

    The memory of the whole model is the weighted sum of the memory that these runs measure.
    """
    pipeline, schedule = parallelism.pipeline, parallelism.schedule
    if pipeline == 1:
        counts = {min(microbatches, MICROBATCHES): 1.0}
    elif schedule is PipelineSchedule.gpipe:
        counts = _axis(microbatches, (pipeline, 2 * pipeline))
    elif schedule is PipelineSchedule.one_f_one_b:
        counts = {min(microbatches, 2 * pipeline): 1.0}  # it holds no more
    else:  # torch keeps what these schedules have sent until the step ends
        counts = _axis(microbatches, (3 * pipeline, 4 * pipeline))
    of_depth = _axis(depth, DEPTHS)
    return {(d, count): of_depth[d] * counts[count] for d, count in itertools.product(of_depth, counts)}


def _axis(target: int, run: tuple[int, int]) -> dict[int, float]:
    """Return one or two values to run, with the weights by which their results are combined.

    The weights extrapolate linearly from the two values `run` to `target`. If `target` is not greater than these
    values, `target` itself is run.
    """
    low, high = run
    if target <= high:
        return {target: 1.0}
    high_weight = (target - low) / (high - low)
    return {low: 1 - high_weight, high: high_weight}


def _extended(
    rank: int, points: Mapping[tuple[int, int], float], run_at: Callable[[int, int], RankMemory]
) -> RankMemory:
    peaks: dict[MemoryPhase, dict[MemoryKind, float]] = {}
    sent: dict[str, float] = {}
    host = dict.fromkeys(MemoryKind, 0.0)
    for (depth, count), weight in points.items():
        point_memory = run_at(depth, count)
        for phase, kinds in point_memory.peaks.items():
            total = peaks.setdefault(phase, dict.fromkeys(MemoryKind, 0.0))
            for kind, size in kinds.items():
                total[kind] += weight * size
        for name, size in point_memory.sent.items():
            sent[name] = sent.get(name, 0.0) + weight * size
        for kind, size in point_memory.host.items():
            host[kind] += weight * size
    return RankMemory(rank, peaks, sent, host)


def _run(
    config: TrainerConfig,
    parallelism: ParallelismConfig,
    size: int,
    rank: int,
    left_out: int,
    plan: BatchPlan,
    data: DataDescription | None = None,
) -> RankMemory:
    """Run one step of the model without the last `left_out` blocks of each stage, and return the memory of the rank."""
    config = as_on_gpus(config)
    own = None if data is None else OwnSpec(config, data.shape(config))
    parts = [
        dataclasses.replace(part, blocks=part.blocks[: max(1, len(part.blocks) - left_out)])
        for part in stages_of(config, parallelism)
    ]
    with ExitStack() as stack:
        world = stack.enter_context(fake_rank(rank, size, parallelism, config.model.experts is not None))
        ledger = Ledger(stack.enter_context(fake_tensors(own)), config.memory.offload is Offload.state)
        stack.enter_context(mock.patch.object(parallelize, "divided", return_value=parts))
        stack.enter_context(norms_of_cuda())
        stack.enter_context(ledger.resizing())
        stack.enter_context(ledger.routing())
        stack.enter_context(ledger.orthogonalizing())
        stack.enter_context(ledger)
        stack.enter_context(measured_waits(world))
        model = parallelize.parallelized(config, world, own)
        optimizer = LocalOptimizer(model, config.optimizer, 0, exact=config.bitwise)
        _mark(ledger, model, optimizer)
        ledger.fresh()
        sums = summing.sums(config, model, plan, world)
        engine = engine_of(model, optimizer, sums, config, plan, world)
        microbatches = [microbatch(config, plan.rows, data) for _ in range(plan.microbatches)]
        with running(own):
            engine.forward_backward(microbatches if own is None else microbatches[:MICROBATCHES])
        ledger.mark_state(MemoryKind.gradients, optimizer.gradients())  # a rank that shares no weights reduces nothing
        with zeros_where_looked_at():  # `bitwise` adds up digits as Python's integers
            sums.squares(optimizer.counted_gradients())
            ledger.updating = True
            optimizer.update(1e-3, 0.5)  # NAdam computes with its product of momentums on the host
        dimensions = _dimensions(world)
        sent: dict[str, float] = {}
        for (group, operation), count in ledger.sent.items():
            name = f"{dimensions.get(group, 'all')} {operation}"
            sent[name] = sent.get(name, 0.0) + count
        return RankMemory(rank, {phase: dict(kinds) for phase, kinds in ledger.peaks.items()}, sent, dict(ledger.host))


def _mark(ledger: Ledger, model: Stages, optimizer: LocalOptimizer) -> None:
    ledger.mark_state(MemoryKind.weights, [parameter.detach() for _, parameter in model.named_parameters()])
    for moments in optimizer.moments().values():
        ledger.mark_state(MemoryKind.moments, list(moments.values()))
    for parameter in (parameter for _, parameter in model.named_parameters() if parameter.requires_grad):
        # FSDP calls the hook when gradients are reduced. If the state is offloaded, they are in host memory by then.
        parameter.register_post_accumulate_grad_hook(
            lambda reduced: ledger.mark_state(MemoryKind.gradients, [reduced.grad] if reduced.grad is not None else [])
        )


def _dimensions(world: DistContext) -> Mapping[str, str]:
    """Return the dimension of parallelism of each process group, keyed by the group's name."""
    meshes = world.meshes
    dimension_by_group: dict[str, str] = {}
    fsdp = ("fsdp",) if meshes.fsdp.ndim == 1 else ("replicate", "fsdp")
    for axis, name in enumerate(fsdp):
        dimension_by_group[meshes.fsdp.get_group(axis).group_name] = name
    if meshes.expert_fsdp is not None:
        dimension_by_group |= {
            meshes.expert_fsdp.get_group(axis).group_name: f"{name} of experts" for axis, name in enumerate(fsdp)
        }
    for name in ("pipeline", "sequence", "context", "tensor", "expert"):
        if (mesh := getattr(meshes, name)) is not None:
            dimension_by_group[mesh.get_group().group_name] = name
    return dimension_by_group
