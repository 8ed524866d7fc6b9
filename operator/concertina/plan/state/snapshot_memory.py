"""Whether the snapshots of a job fit into the memory that its pods have: known before anything starts (decision
"Whether snapshots fit is known first").

A rank's snapshot holds its part of the weights, and of AdamW's two moments of those that are trained, float32. A
replica keeps three of each of its workers, one more while that is on its way to storage, and two of the replica before
it; with one replica there is no other. They live in nine tenths of the container's memory (`room`). A round that goes
on from memory begins with two of its own and two of the other's (`concertina_agent.core.snapshot_index`), and with one
of each as soon as all have restored.
The agent's own files (PROGRAM) and each shard's header (HEADER) lie beside them, and of a job that is tracked the spool
of what its tracker has not taken.
"""

from __future__ import annotations

from typing import NamedTuple

from concertina.api.quantity_fields import amounts_of, bytes_of
from concertina.api.spec import JobSpec
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Pods, stalled
from concertina_protocol.sidecar import COPY_SLOTS, SNAPSHOT_SLOTS
from concertina_protocol.tracking import spool
from concertina_trainer.degrees import Degrees

SHIPPING = 1
WEIGHT_BYTES, GRADIENT_BYTES, MOMENTS_BYTES = 4, 4, 8
"""Of each weight, and of each that is trained."""
PROGRAM = 4 << 20
"""Bytes: what the init container writes (1.6 MiB), and the agent's marks and lists."""
HEADER = 1 << 20
"""Bytes, of each shard's file: 0.3 KiB for each tensor that the rank has a part of."""


class Weights(NamedTuple):
    all: int
    trained: int


def needed(spec: JobSpec, replicas: int, weights: Weights | None = None) -> int:
    """Bytes that each of so many replicas takes of its memory volume. `weights`: of a model of one's own."""
    copies = SNAPSHOT_SLOTS + (SHIPPING if spec.checkpoint else 0) + (COPY_SLOTS if replicas > 1 else 0)
    shards = copies * _bytes(spec, MOMENTS_BYTES, weights) // replicas + copies * spec.workers * HEADER
    return shards + PROGRAM + (spool.MOST_BYTES if spec.tracking else 0)


def _bytes(spec: JobSpec, trained: int, weights: Weights | None = None) -> int:
    """`trained`: besides, of each weight that is trained. 0 of a model of one's own whose `weights` are not given: how
    many it has, only its image knows."""
    model = spec.trainer and spec.trainer.model
    if weights is None and model and not model.entrypoint:
        weights = Weights(model.weights, model.trained_weights)
    return WEIGHT_BYTES * weights.all + trained * weights.trained if weights else 0


def offloaded(spec: JobSpec, replicas: int, weights: Weights | None = None) -> int:
    """Bytes of the state itself that each of so many replicas has in host memory (`trainer.memory.offload`). `weights`:
    of a model of one's own."""
    if spec.trainer is None or spec.trainer.memory.offload is None:
        return 0
    copies = Degrees.of(spec.parallelism, replicas * spec.workers).replicate
    return _bytes(spec, MOMENTS_BYTES + GRADIENT_BYTES, weights) * copies // replicas


def _fits(spec: JobSpec, replicas: int, has: int) -> bool:
    if not replicas:  # no size is valid, as `start.no_size` says
        return True
    return needed(spec, replicas) + offloaded(spec, replicas) <= has


def room(spec: JobSpec) -> int | None:
    """Bytes that a replica has for them, and for an offloaded state; None: there is no limit."""
    limits = amounts_of(spec.template.trainer.model_extra or {}, "limits")
    return bytes_of(limits.get("memory")) * 9 // 10 or None


def too_small(ctx: JobContext) -> Decision | None:
    """No size of the job has room for its snapshots."""
    spec = ctx.spec
    if not spec.bundled or ctx.world.members or not (has := room(spec)) or _fits(spec, sizes.most(spec), has):
        return None
    return stalled("MemoryTooSmall", f"{_sentence(spec, sizes.most(spec), has)}. {_ADVICE}", Pods.NONE)


def events(ctx: JobContext) -> tuple[Event, ...]:
    """Told once, when the job begins: it fits now, and would not when it has shrunk."""
    spec = ctx.spec
    if not spec.bundled or ctx.status.start_time or not (has := room(spec)) or _fits(spec, sizes.least(spec), has):
        return ()
    return (Event("Warning", "MemoryTight", f"{_sentence(spec, sizes.least(spec), has)}. {_ADVICE}"),)


_ADVICE = "Raise resources.limits.memory of the container trainer, or have more replicas (also elastic.minReplicas)"


def _sentence(spec: JobSpec, replicas: int, has: int) -> str:
    besides = offloaded(spec, replicas)
    return (
        f"with {replicas} replicas the snapshots of each take {needed(spec, replicas) / 2**20:,.0f} MiB (of "
        f"{_bytes(spec, MOMENTS_BYTES) / 2**20:,.0f} MiB of state in all), "
        + (f"its offloaded state {besides / 2**20:,.0f} MiB, " if besides else "")
        + "and nine "
        f"tenths of the memory limit are {has / 2**20:,.0f} MiB"
    )
