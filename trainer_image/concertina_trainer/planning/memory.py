"""Memory of one rank at its peak, and what it sends in a step: two small depths are run, and the rest is a line.

Each block adds the same to all that is there at a peak, and is there at it whatever the depth; so do microbatches that
GPipe holds, and what an interleaved schedule has sent. What is run is the trainer's own code: how it cuts the model,
its engine, its optimizer. Of a model of one's own nobody here knows what its depth is, so it is run whole."""

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
from concertina_trainer.model.optimizer import ShardedAdamW
from concertina_trainer.model.own import OwnSpec, loaded
from concertina_trainer.model.stages import Stages, divided
from concertina_trainer.parallel import parallelize, summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.tensor import loss_context
from concertina_trainer.planning.described_model import HERE, DataDescription, as_on_gpus, microbatch, running
from concertina_trainer.planning.fake import fake_rank, fake_tensors, zeros_where_looked_at
from concertina_trainer.planning.ledger import Ledger, MemoryKind, MemoryPhase
from concertina_trainer.training.engine import engine_of

DEPTHS = (3, 4)
"""Blocks of a stage: with fewer FSDP has less on its way at once, weights beforehand and gradients afterwards."""
MICROBATCHES = 2
"""From the second on the gradients of those before are there; more are the same again."""


@dataclasses.dataclass(frozen=True)
class RankMemory:
    rank: int
    peaks: Mapping[MemoryPhase, Mapping[MemoryKind, float]]
    """Bytes, on the device."""
    sent: Mapping[str, float]
    """Bytes of collectives, by dimension and operation, as `fsdp all-gather`."""
    host: Mapping[MemoryKind, float]
    """Bytes of the state that is in host memory."""

    @property
    def peak(self) -> Mapping[MemoryKind, float]:
        return max(self.peaks.values(), key=lambda kinds: sum(kinds.values()))


def stages_of(config: TrainerConfig, parallelism: ParallelismConfig) -> list[StageLayers]:
    return divided(config.model, parallelism.pipeline * parallelism.stages_per_rank)


def fullest(config: TrainerConfig, parallelism: ParallelismConfig, size: int) -> list[int]:
    """Ranks of which one has the highest peak: of a pipeline those that no other covers, which has as much of the model
    and as many microbatches waiting. Fewer wait the later a rank's stages are; with zero bubble it is the other way
    round, as weights' gradients wait too."""
    degrees = Degrees.of(parallelism, size)
    parts = stages_of(config, parallelism)
    has = [_contents(config, parts[place :: degrees.pipeline]) for place in range(degrees.pipeline)]
    wanted: list[int] = []
    for place in sorted(range(degrees.pipeline), reverse=parallelism.backward_in_halves):
        if not any(all(map(operator.ge, has[other], has[place])) for other in wanted):
            wanted.append(place)
    return [place * degrees.context * degrees.tensor for place in sorted(wanted)]


def _contents(config: TrainerConfig, stages: Sequence[StageLayers]) -> list[int]:
    """Of a rank's stages one after another: blocks of each sort, and the ends."""
    found = []
    for part in stages:
        routed = sum(map(config.model.routed, part.blocks))
        found += [routed, len(part.blocks) - routed, part.first, part.last]
    return found


def memory(
    config: TrainerConfig, parallelism: ParallelismConfig, size: int, rank: int, data: DataDescription | None = None
) -> RankMemory:
    """`data`: of a model of one's own. Raises InvalidInput where the world is no whole number of blocks, and where that
    model can't be run."""
    degrees = Degrees.of(parallelism, size)
    if data is not None:
        loaded(str(config.model.entrypoint), HERE)  # what it makes while it is imported stays real
        return _run(config, parallelism, size, rank, 0, batch_plan(config, degrees), data)
    place = degrees.place(rank).pipeline
    # Plain layers before those with experts are few, and are run as they are.
    stages = stages_of(config, parallelism)[place :: degrees.pipeline]
    blocks = [sum(map(config.model.routed, part.blocks)) or len(part.blocks) for part in stages]
    plan = batch_plan(config, degrees)
    # Stages of one rank grow together: with their proportions the moment of the peak would change.
    shallow = min(blocks)

    def at(depth: int, count: int) -> RankMemory:
        return _run(config, parallelism, size, rank, shallow - depth, dataclasses.replace(plan, microbatches=count))

    return _extended(rank, _points(shallow, plan.microbatches, parallelism), at)


def _points(depth: int, microbatches: int, parallelism: ParallelismConfig) -> dict[tuple[int, int], float]:
    """At which depths and numbers of microbatches to run, and with which weights these add up to the ones asked for."""
    pipeline, schedule = parallelism.pipeline, parallelism.schedule
    if pipeline == 1:
        counts = {min(microbatches, MICROBATCHES): 1.0}
    elif schedule is PipelineSchedule.gpipe:
        counts = _axis(microbatches, (pipeline, 2 * pipeline))
    elif schedule is PipelineSchedule.one_f_one_b:
        counts = {min(microbatches, 2 * pipeline): 1.0}  # it holds no more
    else:  # torch keeps what these have sent until the step ends
        counts = _axis(microbatches, (3 * pipeline, 4 * pipeline))
    of_depth = _axis(depth, DEPTHS)
    return {(d, count): of_depth[d] * counts[count] for d, count in itertools.product(of_depth, counts)}


def _axis(target: int, run: tuple[int, int]) -> dict[int, float]:
    """At which points to run, and with which weights these add up to the target."""
    low, high = run
    if target <= high:
        return {target: 1.0}
    beyond = (target - low) / (high - low)
    return {low: 1 - beyond, high: beyond}


def _extended(rank: int, points: Mapping[tuple[int, int], float], at: Callable[[int, int], RankMemory]) -> RankMemory:
    peaks: dict[MemoryPhase, dict[MemoryKind, float]] = {}
    sent: dict[str, float] = {}
    host = dict.fromkeys(MemoryKind, 0.0)
    for (depth, count), weight in points.items():
        found = at(depth, count)
        for phase, kinds in found.peaks.items():
            total = peaks.setdefault(phase, dict.fromkeys(MemoryKind, 0.0))
            for kind, size in kinds.items():
                total[kind] += weight * size
        for name, size in found.sent.items():
            sent[name] = sent.get(name, 0.0) + weight * size
        for kind, size in found.host.items():
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
    """Without so many of the last blocks of each stage of the decoder."""
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
        stack.enter_context(ledger.resizing())
        stack.enter_context(ledger.routing())
        stack.enter_context(ledger)
        stack.enter_context(loss_context(world))
        model = parallelize.parallelized(config, world, own)
        optimizer = ShardedAdamW(model, config.optimizer, 0, exact=config.bitwise)
        _mark(ledger, model, optimizer)
        ledger.fresh()
        sums = summing.sums(config, model, plan, world)
        engine = engine_of(model, optimizer, sums, config, plan, world)
        microbatches = [microbatch(config, plan.rows, data) for _ in range(plan.microbatches)]
        with running(own):
            engine.forward_backward(microbatches if own is None else microbatches[:MICROBATCHES])
        ledger.mark_state(MemoryKind.gradients, optimizer.gradients())  # who shares weights with nobody reduces nothing
        with zeros_where_looked_at():  # `bitwise` adds up digits as Python's integers
            sums.squares(optimizer.counted_gradients())
        ledger.updating = True
        optimizer.update(1e-3, 0.5)
        dimensions = _dimensions(world)
        sent: dict[str, float] = {}
        for (group, operation), count in ledger.sent.items():
            name = f"{dimensions.get(group, 'all')} {operation}"
            sent[name] = sent.get(name, 0.0) + count
        return RankMemory(rank, {phase: dict(kinds) for phase, kinds in ledger.peaks.items()}, sent, dict(ledger.host))


def _mark(ledger: Ledger, model: Stages, optimizer: ShardedAdamW) -> None:
    ledger.mark_state(MemoryKind.weights, [parameter.detach() for _, parameter in model.named_parameters()])
    for moments in optimizer.moments().values():
        ledger.mark_state(MemoryKind.moments, list(moments.values()))
    for parameter in (each for _, each in model.named_parameters() if each.requires_grad):
        # FSDP calls it for what it has reduced, which it has copied to the host by then, were there a device.
        parameter.register_post_accumulate_grad_hook(
            lambda reduced: ledger.mark_state(MemoryKind.gradients, [reduced.grad] if reduced.grad is not None else [])
        )


def _dimensions(world: DistContext) -> Mapping[str, str]:
    """By the name of the process group."""
    meshes = world.meshes
    found: dict[str, str] = {}
    fsdp = ("fsdp",) if meshes.fsdp.ndim == 1 else ("replicate", "fsdp")
    for at, name in enumerate(fsdp):
        found[meshes.fsdp.get_group(at).group_name] = name
    if meshes.expert_fsdp is not None:
        found |= {meshes.expert_fsdp.get_group(at).group_name: f"{name} of experts" for at, name in enumerate(fsdp)}
    for name in ("pipeline", "sequence", "context", "tensor", "expert"):
        if (mesh := getattr(meshes, name)) is not None:
            found[mesh.get_group().group_name] = name
    return found
