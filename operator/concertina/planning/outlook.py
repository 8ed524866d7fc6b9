"""Estimate for a layout: all values that `concertina plan` reports, and the main bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from concertina.api.spec import JobSpec
from concertina.plan.state import snapshot_memory
from concertina.planning import muon
from concertina.planning.hardware import FABRICS, FabricName, Gpu
from concertina.planning.layout import OwnDescription, ParallelLayout
from concertina.planning.reading import Reading, reading
from concertina.planning.timing import StepTime, bubble_share, hfu, link, mfu, step_time
from concertina.planning.traffic import Traffic, batch, traffic
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.parallelism import PipelineSchedule

DAY, HOUR = 86400.0, 3600.0
NOTABLE = 0.05
"""Smallest share of a step that counts as a bottleneck."""


@dataclasses.dataclass(frozen=True)
class RankMemoryEstimate:
    """Peak memory of a rank in bytes, by kind.

    The trainer's own code measures it (concertina_trainer.planning).
    """

    rank: int
    phase: str
    kinds: Mapping[str, int]
    """Bytes of device memory, by kind of data."""
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of training state in host memory, by kind of data."""

    @property
    def total(self) -> int:
        """Bytes of device memory that the rank needs, over all kinds."""
        return sum(self.kinds.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


def rank_memory(measured: Mapping[str, Any]) -> RankMemoryEstimate:
    """Return the memory estimate from the output of `python -m concertina_trainer.planning`."""
    phase, kinds = max(measured["peaks"].items(), key=lambda peak: sum(peak[1].values()))
    return RankMemoryEstimate(measured["rank"], phase, kinds, measured["host"])


@dataclasses.dataclass(frozen=True)
class Budget:
    """Number of tokens, duration and cost of a complete training run."""

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
    reading: Reading
    memory: Sequence[RankMemoryEstimate]
    """Memory of the ranks that need the most GPU memory. Empty if no rank was measured."""
    snapshots: int
    """Bytes that the snapshots of one replica use in its memory volume."""
    offloaded: int
    """Bytes of a replica's training state that are offloaded to host memory. Snapshots are not included."""
    room: int | None
    """Bytes of the container's memory limit that are available for snapshots and offloaded state.

    None without a limit.
    """
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
    def hfu(self) -> float | None:
        return hfu(self.layout, self.gpu, self.time.total)

    @property
    def peak(self) -> RankMemoryEstimate | None:
        return max(self.memory, key=lambda rank: rank.total, default=None)

    @property
    def fits(self) -> bool | None:
        """True if the highest peak of all measured ranks fits into the GPU's memory; None if no rank was measured."""
        return None if self.peak is None else self.peak.total <= self.gpu.usable

    def rate(self, part: Traffic) -> float:
        """Return the rate, in bytes per second, of the link over which the traffic `part` travels."""
        return link(self.layout, part, self.gpu, FABRICS[self.fabric])


def outlook(
    spec: JobSpec,
    layout: ParallelLayout,
    gpu: Gpu,
    fabric: FabricName,
    memory: Sequence[RankMemoryEstimate] = (),
    tokens: float | None = None,
) -> Estimate:
    """Return the estimate for a layout.

    Args:
        spec: Spec of the job.
        layout: Valid layout: that of the job, or an alternative.
        gpu: GPU of each rank.
        fabric: Network between nodes.
        memory: Measured memory of ranks, if available.
        tokens: Number of tokens of the run. The default follows from the job's number of steps.
    """
    trainer, replicas = layout.trainer, layout.size // layout.per_node
    time = step_time(layout, gpu, FABRICS[fabric])
    per_step = trainer.global_batch_size * trainer.model.sequence_length
    tokens = per_step * trainer.last_step if tokens is None else tokens
    seconds = tokens / per_step * time.total
    price = spec.price
    cost = seconds / HOUR * replicas * price.replica_hour if price else None
    weights = snapshot_memory.Weights(layout.weights, layout.trained, layout.matrices)
    tried_spec = spec.model_copy(update={"trainer": trainer, "parallelism": layout.parallelism})
    return Estimate(
        layout, replicas, gpu, fabric, time, [*traffic(layout), *muon.traffic(layout)], reading(layout), memory,
        snapshot_memory.needed(tried_spec, replicas, weights), snapshot_memory.offloaded(tried_spec, replicas, weights),
        snapshot_memory.room(spec), Budget(tokens, seconds, cost, price.currency if price else ""),
    )  # fmt: skip


def sizes(spec: JobSpec, smallest: int, largest: int) -> list[int]:
    """Return all valid numbers of replicas from `smallest` to `largest`.

    The result is empty if `smallest` is 0, which means that no number is valid.
    """
    return list(range(smallest, largest + 1, spec.replica_step)) if smallest else []


def bottleneck(estimate: Estimate) -> str:
    """Return a sentence that says what limits the speed of a layout, and what to try.

    If the layout does not fit into memory, the sentence says so instead.
    """
    time, gpu = estimate.time, estimate.gpu
    peak = estimate.peak
    if peak is not None and not estimate.fits:
        largest = max(peak.kinds, key=lambda kind: peak.kinds[kind])
        return (
            f"Memory: rank {peak.rank} needs {_gib(peak.total)} of the {_gib(gpu.usable)} that tensors "
            f"can have on {gpu.name}, mostly for {largest} ({_gib(peak.kinds[largest])}): "
            f"{_less(estimate, largest)}."
        )
    if estimate.room is not None and estimate.snapshots + estimate.offloaded > estimate.room:
        besides = f", its offloaded state {_gib(estimate.offloaded)}" if estimate.offloaded else ""
        return (
            f"Memory of nodes: the snapshots of a replica take {_gib(estimate.snapshots)}{besides}, but only "
            f"nine tenths of the container's limit, {_gib(estimate.room)}, are available: raise "
            "resources.limits.memory, or use more replicas."
        )
    parts: dict[str, float] = {"bubble": time.bubble, "filling": time.filling, "optimizer": time.optimizer}
    parts["host"] = time.host
    parts |= {str(dimension): seconds for dimension, seconds in time.communication.items()}
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / time.total
    if share < NOTABLE:
        return (
            f"Computation: {time.compute / time.total:.0%} of a step, and nothing else takes more than a "
            "twentieth. More GPUs make training faster as long as the batch has sequences for them."
        )
    if name == "optimizer" and estimate.layout.trainer.optimizer.kind.others:
        name = "muon"
    return f"{_WORDS[name].format(share=f'{share:.0%}', **_facts(estimate))}."


_WORDS = {
    "bubble": "Pipeline: ranks wait {share} of a step for other stages ({microbatches} microbatches, {pipeline} "
    "stages). Raise globalBatchSize, choose an interleaved schedule, or use fewer stages",
    "filling": "Batch: {share} of a step computes empty rows, because globalBatchSize is not divisible. Make it a "
    "multiple of {data} x microBatchSize",
    "optimizer": "Optimizer: {share} of a step reads and writes weights and moments. Shard over more ranks",
    "muon": "Optimizer: {share} of a step gathers and orthogonalizes matrices. Every rank does this with all matrices "
    "of its layers. Raise globalBatchSize or parallelism.pipeline, or choose another optimizer",
    "host": "Host memory: {share} of a step copies weights from host memory and gradients to it. Raise "
    "microBatchSize, or remove memory.offload",
    "tensor": (
        "Tensor parallelism: ranks wait {share} of a step for activations{tensor_link}. Use fewer ranks per "
        "tensor group"
    ),
    "expert": "Experts: ranks wait {share} of a step to send tokens to experts and back{expert_link}. "
    "Use fewer ranks per expert group, on one node if possible",
    "context": (
        "Context parallelism: ranks wait {share} of a step to gather keys and values{context_link}. Use "
        "fewer ranks per context group"
    ),
    "shard": "FSDP: ranks wait {share} of a step for weights or gradients, without computation in "
    "parallel{shard_link}. Raise microBatchSize, set memory.reshardAfterForward to Never, or set "
    "parallelism.shard to fewer ranks",
    "replicate": (
        "Replication: ranks wait {share} of a step to reduce gradients between copies of the model. Raise "
        "globalBatchSize"
    ),
    "pipeline": "Pipeline: ranks wait {share} of a step to send activations between stages. Raise microBatchSize",
}


def _facts(estimate: Estimate) -> dict[str, Any]:
    layout = estimate.layout
    crossing = {
        f"{group}_link": f", over {estimate.fabric} between nodes" if layout.crosses(group) else ""
        for group in layout.groups
    }
    return {
        "microbatches": batch(layout).microbatches,
        "pipeline": layout.parallelism.pipeline * layout.parallelism.stages_per_rank,
        "data": layout.data,
        **crossing,
    }


def _less(estimate: Estimate, kind: str) -> str:
    if estimate.layout.own is not None:
        return _less_of_own(estimate, estimate.layout.own, kind)
    trainer, parallelism = estimate.layout.trainer, estimate.layout.parallelism
    if kind in ("activations", "routed", "temporary"):
        if parallelism.pipeline > 1 and parallelism.schedule is PipelineSchedule.gpipe:
            return (
                "GPipe keeps the activations of all microbatches, so choose parallelism.schedule OneForwardOneBackward"
            )
        if trainer.memory.resolved_activations is not Activations.recompute:
            return "set trainer.memory.activations to Recompute, or lower microBatchSize"
        if trainer.resolved_micro_batch_size > 1:
            return "lower microBatchSize"
        return "raise parallelism.tensor or parallelism.context"
    if kind == "gradients" and batch(estimate.layout).microbatches > 1:
        return (
            "the gradients of several microbatches are added up before they are sharded; raise microBatchSize "
            "until there is one microbatch, or raise parallelism.tensor or parallelism.pipeline"
        )
    if kind in ("weights", "moments"):
        degrees_to_raise = (
            "parallelism.tensor or parallelism.pipeline" if parallelism.shard is None else "parallelism.shard"
        )
        return f"raise {degrees_to_raise}, or set memory.offload to State"
    if kind in ("gathered", "gradients") and trainer.model.experts is not None:
        return "raise parallelism.expert"
    return "raise parallelism.tensor or parallelism.pipeline"


def _less_of_own(estimate: Estimate, own: OwnDescription, kind: str) -> str:
    """Return advice on how to reduce the memory of a custom model, which only FSDP can shard."""
    trainer, parts = (
        estimate.layout.trainer,
        "give ModelSpec.blocks " + ("smaller parts" if own.blocks else "the parts"),
    )
    if kind in ("activations", "temporary"):
        if own.blocks and trainer.memory.resolved_activations is not Activations.recompute:
            return "set trainer.memory.activations to Recompute, or lower microBatchSize"
        shorter = (
            "lower microBatchSize" if trainer.resolved_micro_batch_size > 1 else "lower trainer.model.sequenceLength"
        )
        return (
            shorter
            if own.blocks
            else f"{parts} of the model, so that their activations can be recomputed, or {shorter}"
        )
    if kind == "gradients" and batch(estimate.layout).microbatches > 1:
        return "set memory.reshardAfterForward to Always, so that the gradients of each microbatch are sharded"
    if kind in ("weights", "moments", "gradients"):
        wider = "have more replicas" if estimate.layout.parallelism.shard is None else "raise parallelism.shard"
        return f"{wider}, or set memory.offload to State"
    return f"{parts}, because FSDP gathers one part at a time, or set memory.reshardAfterForward to Always"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def as_object(estimate: Estimate) -> dict[str, Any]:
    layout, plan = estimate.layout, batch(estimate.layout)
    return {
        "replicas": estimate.replicas,
        "ranks": layout.size,
        "ranksPerReplica": layout.per_node,
        "degrees": {str(group): layout.degree(group) for group in layout.groups},
        "schedule": layout.parallelism.schedule if layout.parallelism.pipeline > 1 else None,
        "activations": layout.trainer.memory.resolved_activations,
        "acrossNodes": [str(group) for group in layout.groups if layout.crosses(group)],
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
            for rank in estimate.memory
        ],
        "fits": estimate.fits,
        "snapshotBytes": estimate.snapshots,
        "offloadedBytes": estimate.offloaded,
        "dataGroups": estimate.reading.total,
        "dataGroupsRead": list(estimate.reading.groups),
        "traffic": [
            {
                "dimension": str(part.dimension), "what": part.name, "ranks": part.ranks, "times": part.times,
                "bytes": round(part.bytes), "sent": round(part.sent), "acrossNodes": layout.crosses(part.dimension),
                "bytesPerSecond": round(estimate.rate(part)), "hidden": not part.exposed,
            }
            for part in estimate.traffic
        ],
        "gpu": estimate.gpu.name,
        "fabric": estimate.fabric,
        "stepSeconds": estimate.time.total,
        "seconds": {
            "compute": estimate.time.compute, "bubble": estimate.time.bubble, "optimizer": estimate.time.optimizer,
            "host": estimate.time.host,
            "communication": {str(group): seconds for group, seconds in estimate.time.communication.items()},
        },
        "bubble": bubble_share(layout, plan.microbatches),
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "tokensPerSecond": estimate.tokens_per_second,
        "budget": estimate.budget and {
            "tokens": estimate.budget.tokens, "days": estimate.budget.seconds / DAY, "cost": estimate.budget.cost,
            "currency": estimate.budget.currency,
        },
        "bottleneck": bottleneck(estimate),
    }  # fmt: skip
