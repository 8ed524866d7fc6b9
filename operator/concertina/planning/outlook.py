"""What a layout will be like: all that `concertina plan` says of it, and the first thing that holds it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from concertina.api.spec import JobSpec
from concertina.plan.state import snapshot_memory
from concertina.planning.hardware import FABRICS, USABLE, FabricName, Gpu
from concertina.planning.layout import OwnDescription, ParallelLayout
from concertina.planning.timing import StepTime, bubble_share, link, mfu, step_time
from concertina.planning.traffic import Traffic, batch, traffic
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.parallelism import PipelineSchedule

DAY, HOUR = 86400.0, 3600.0
NOTABLE = 0.05
"""Part of a step from which on something is said to hold it back."""


@dataclasses.dataclass(frozen=True)
class RankMemoryEstimate:
    """Bytes of a rank at its peak, by kind; measured in the trainer's own code (concertina_trainer.planning)."""

    rank: int
    phase: str
    kinds: Mapping[str, int]
    """Of the device."""
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of the state that is in host memory."""

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(self.kinds.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


def rank_memory(found: Mapping[str, Any]) -> RankMemoryEstimate:
    """As `python -m concertina_trainer.planning` writes it."""
    phase, kinds = max(found["peaks"].items(), key=lambda peak: sum(peak[1].values()))
    return RankMemoryEstimate(found["rank"], phase, kinds, found["host"])


@dataclasses.dataclass(frozen=True)
class Budget:
    """Of a whole run."""

    tokens: float
    seconds: float
    cost: float | None
    currency: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    layout: ParallelLayout
    replicas: int
    gpu: Gpu
    fabric: FabricName
    time: StepTime
    traffic: Sequence[Traffic]
    memory: Sequence[RankMemoryEstimate]
    """Of the ranks that take most; empty where it was not measured."""
    snapshots: int
    """Bytes of a replica's memory volume."""
    offloaded: int
    """Bytes of a replica's state in host memory, beside them."""
    room: int | None
    """That the container's memory limit leaves for both; None: there is no limit."""
    budget: Budget | None

    @property
    def tokens_per_step(self) -> int:
        return self.layout.trainer.global_batch_size * self.layout.trainer.model.sequence_length

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.time.total

    @property
    def mfu(self) -> float:
        return mfu(self.layout, self.gpu, self.time.total)

    @property
    def peak(self) -> RankMemoryEstimate | None:
        return max(self.memory, key=lambda rank: rank.total, default=None)

    @property
    def fits(self) -> bool | None:
        """None: it is not known."""
        return None if self.peak is None else self.peak.total <= self.gpu.memory * USABLE

    def rate(self, part: Traffic) -> float:
        """Bytes a second."""
        return link(self.layout, part, self.gpu, FABRICS[self.fabric])


def outlook(
    spec: JobSpec,
    layout: ParallelLayout,
    gpu: Gpu,
    fabric: FabricName,
    memory: Sequence[RankMemoryEstimate] = (),
    tokens: float | None = None,
) -> Estimate:
    """`layout`: a valid one of this job, or another that is tried for it. `tokens`: of the run; else its steps say."""
    trainer, replicas = layout.trainer, layout.size // layout.per_node
    time = step_time(layout, gpu, FABRICS[fabric])
    per_step = trainer.global_batch_size * trainer.model.sequence_length
    tokens = per_step * trainer.last_step if tokens is None else tokens
    seconds = tokens / per_step * time.total
    price = spec.price
    cost = seconds / HOUR * replicas * price.replica_hour if price else None
    weights = snapshot_memory.Weights(layout.weights, layout.trained)
    tried = spec.model_copy(update={"trainer": trainer, "parallelism": layout.parallelism})
    return Estimate(
        layout, replicas, gpu, fabric, time, traffic(layout), memory,
        snapshot_memory.needed(tried, replicas, weights), snapshot_memory.offloaded(tried, replicas, weights),
        snapshot_memory.room(spec), Budget(tokens, seconds, cost, price.currency if price else ""),
    )  # fmt: skip


def sizes(spec: JobSpec, least: int, most: int) -> list[int]:
    """All valid ones, in replicas."""
    return list(range(least, most + 1, spec.replica_step)) if least else []


def bottleneck(seen: Estimate) -> str:
    """The first thing that holds it back, and what to try."""
    time, gpu = seen.time, seen.gpu
    peak = seen.peak
    if peak is not None and not seen.fits:
        largest = max(peak.kinds, key=lambda kind: peak.kinds[kind])
        return (
            f"Memory: rank {peak.rank} needs {_gib(peak.total)} of the {_gib(gpu.memory * USABLE)} that tensors can "
            f"have on {gpu.name}, most of it {largest} ({_gib(peak.kinds[largest])}): {_less(seen, largest)}."
        )
    if seen.room is not None and seen.snapshots + seen.offloaded > seen.room:
        besides = f", its offloaded state {_gib(seen.offloaded)}" if seen.offloaded else ""
        return (
            f"Memory of nodes: the snapshots of a replica take {_gib(seen.snapshots)}{besides}, and nine tenths of the "
            f"container's limit are {_gib(seen.room)}: raise resources.limits.memory, or have more replicas."
        )
    parts: dict[str, float] = {"bubble": time.bubble, "filling": time.filling, "optimizer": time.optimizer}
    parts["host"] = time.host
    parts |= {str(dimension): seconds for dimension, seconds in time.communication.items()}
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / time.total
    if share < NOTABLE:
        return (
            f"Computation: {time.compute / time.total:.0%} of a step, and nothing else takes a twentieth of it. More "
            "GPUs make it faster as long as the batch has sequences for them."
        )
    return f"{_WORDS[name].format(share=f'{share:.0%}', **_facts(seen))}."


_WORDS = {
    "bubble": "The pipeline: ranks wait {share} of a step for other stages ({microbatches} microbatches, {pipeline} "
    "stages): raise globalBatchSize, choose an interleaved schedule, or use fewer stages",
    "filling": "The batch: {share} of a step computes rows that hold nothing, as globalBatchSize does not divide: make "
    "it a multiple of {data} x microBatchSize",
    "optimizer": "The optimizer: {share} of a step reads and writes weights and moments: shard over more ranks",
    "host": "The host's memory: {share} of a step copies weights from there and gradients to it: raise microBatchSize, "
    "or remove memory.offload",
    "tensor": "Tensor parallelism: {share} of a step waits for its activations{tensor_link}: use fewer ranks a group",
    "expert": "Experts: {share} of a step sends tokens to experts and back{expert_link}: use fewer ranks a group, on a "
    "node if they can be",
    "context": "Context parallelism: {share} of a step gathers keys and values{context_link}: use fewer ranks a group",
    "shard": "FSDP: {share} of a step waits for weights or gradients that no computation hides{shard_link}: raise "
    "microBatchSize, set memory.reshardAfterForward to Never, or parallelism.shard to fewer ranks",
    "replicate": "Copies: {share} of a step adds gradients up between them: raise globalBatchSize",
    "pipeline": "The pipeline: {share} of a step sends activations between stages: raise microBatchSize",
}


def _facts(seen: Estimate) -> dict[str, Any]:
    layout = seen.layout
    crossing = {
        f"{each}_link": f", over {seen.fabric} between nodes" if layout.crosses(each) else "" for each in layout.groups
    }
    return {
        "microbatches": batch(layout).microbatches,
        "pipeline": layout.parallelism.pipeline * layout.parallelism.stages_per_rank,
        "data": layout.data,
        **crossing,
    }


def _less(seen: Estimate, kind: str) -> str:
    if seen.layout.own is not None:
        return _less_of_own(seen, seen.layout.own, kind)
    trainer, given = seen.layout.trainer, seen.layout.parallelism
    if kind in ("activations", "routed", "temporary"):
        if given.pipeline > 1 and given.schedule is PipelineSchedule.gpipe:
            return "GPipe keeps those of all microbatches; choose parallelism.schedule OneForwardOneBackward"
        if trainer.memory.activations is not Activations.recompute:
            return "set trainer.memory.activations to Recompute, or lower microBatchSize"
        if trainer.micro_batch_size > 1:
            return "lower microBatchSize"
        return "raise parallelism.tensor or parallelism.context"
    if kind == "gradients" and batch(seen.layout).microbatches > 1:
        return (
            "gradients of several microbatches add up whole before they are reduced; raise microBatchSize, so that "
            "there is one, or parallelism.tensor or pipeline"
        )
    if kind in ("weights", "moments"):
        instead = "parallelism.tensor or parallelism.pipeline" if given.shard is None else "parallelism.shard"
        return f"raise {instead}, or set memory.offload to State"
    if kind in ("gathered", "gradients") and trainer.model.experts is not None:
        return "raise parallelism.expert"
    return "raise parallelism.tensor or parallelism.pipeline"


def _less_of_own(seen: Estimate, own: OwnDescription, kind: str) -> str:
    """FSDP alone cuts it."""
    trainer, parts = seen.layout.trainer, "give ModelSpec.blocks " + ("smaller parts" if own.blocks else "the parts")
    if kind in ("activations", "temporary"):
        if own.blocks and trainer.memory.activations is not Activations.recompute:
            return "set trainer.memory.activations to Recompute, or lower microBatchSize"
        shorter = "lower microBatchSize" if trainer.micro_batch_size > 1 else "lower trainer.model.sequenceLength"
        return shorter if own.blocks else f"{parts} of the model, so that these can be computed again, or {shorter}"
    if kind == "gradients" and batch(seen.layout).microbatches > 1:
        return "set memory.reshardAfterForward to Always, so that each microbatch's are cut"
    if kind in ("weights", "moments", "gradients"):
        wider = "have more replicas" if seen.layout.parallelism.shard is None else "raise parallelism.shard"
        return f"{wider}, or set memory.offload to State"
    return f"{parts}, one of which is gathered at a time, or set memory.reshardAfterForward to Always"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def as_object(seen: Estimate) -> dict[str, Any]:
    layout, plan = seen.layout, batch(seen.layout)
    return {
        "replicas": seen.replicas,
        "ranks": layout.size,
        "ranksPerReplica": layout.per_node,
        "degrees": {str(each): layout.degree(each) for each in layout.groups},
        "schedule": layout.parallelism.schedule if layout.parallelism.pipeline > 1 else None,
        "activations": layout.trainer.memory.activations,
        "acrossNodes": [str(each) for each in layout.groups if layout.crosses(each)],
        "parameters": layout.weights,
        "trainedParameters": layout.trained,
        "flopsPerToken": layout.flops,
        "flopsCounted": layout.own is not None and layout.own.counted,
        "microbatches": plan.microbatches,
        "rows": plan.rows,
        "filling": 0.0 if plan.fixed else plan.filling,
        "memory": [
            {
                "rank": rank.rank, "phase": rank.phase, "total": rank.total, "kinds": dict(rank.kinds),
                "hostBytes": rank.host_total,
            }
            for rank in seen.memory
        ],
        "fits": seen.fits,
        "snapshotBytes": seen.snapshots,
        "offloadedBytes": seen.offloaded,
        "traffic": [
            {
                "dimension": str(part.dimension), "what": part.name, "ranks": part.ranks, "times": part.times,
                "bytes": round(part.bytes), "sent": round(part.sent), "acrossNodes": layout.crosses(part.dimension),
                "bytesPerSecond": round(seen.rate(part)), "hidden": not part.exposed,
            }
            for part in seen.traffic
        ],
        "gpu": seen.gpu.name,
        "fabric": seen.fabric,
        "stepSeconds": seen.time.total,
        "seconds": {
            "compute": seen.time.compute, "bubble": seen.time.bubble, "optimizer": seen.time.optimizer,
            "host": seen.time.host,
            "communication": {str(each): seconds for each, seconds in seen.time.communication.items()},
        },
        "bubble": bubble_share(layout, plan.microbatches),
        "mfu": seen.mfu,
        "tokensPerSecond": seen.tokens_per_second,
        "budget": seen.budget and {
            "tokens": seen.budget.tokens, "days": seen.budget.seconds / DAY, "cost": seen.budget.cost,
            "currency": seen.budget.currency,
        },
        "bottleneck": bottleneck(seen),
    }  # fmt: skip
