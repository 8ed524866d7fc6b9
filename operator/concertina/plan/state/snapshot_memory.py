"""Check that the snapshots of a job fit into the memory of its pods, before anything starts.

The reason is in decision "Memory for snapshots is checked first".

A rank's snapshot holds its part of the weights, and the two moments of AdamW for the weights that are trained, all in
float32. For each of its workers, a replica keeps three snapshots, one more while a snapshot is being copied to storage,
and two copies of the previous replica's snapshots. With one replica there is no previous replica. Snapshots may use
nine tenths of the container's memory (`room`). When a round starts from memory, a replica holds two of its own
snapshots and two of the previous replica's (`concertina_agent.core.snapshot_index`), and one of each as soon as all
ranks have restored. The agent's own files (PROGRAM) and the header of each shard (HEADER) use the same memory, and so
does the spool of a tracked job, with the data that its tracker has not accepted yet.
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
"""Bytes for each weight, and for each one that is trained."""
PROGRAM = 4 << 20
"""Bytes of the files that the init container writes (1.6 MiB), and of the agent's marks and lists."""
HEADER = 1 << 20
"""Bytes of the header of each shard's file: 0.3 KiB for each tensor that the rank has a part of."""


class Weights(NamedTuple):
    all: int
    trained: int


def needed(spec: JobSpec, replicas: int, weights: Weights | None = None) -> int:
    """Return the bytes of its memory volume that each of `replicas` replicas uses.

    `weights` are those of a custom model.
    """
    copies = SNAPSHOT_SLOTS + (SHIPPING if spec.checkpoint else 0) + (COPY_SLOTS if replicas > 1 else 0)
    shards = copies * _bytes(spec, MOMENTS_BYTES, weights) // replicas + copies * spec.workers * HEADER
    return shards + PROGRAM + (spool.MOST_BYTES if spec.tracking else 0)


def _bytes(spec: JobSpec, trained: int, weights: Weights | None = None) -> int:
    """Return the bytes for the weights, plus `trained` bytes for each weight that is trained.

    The result is 0 without `weights` for a custom model, or one that `model.from` describes: only the pods know how
    many it has.
    """
    model = spec.trainer and spec.trainer.model
    if weights is None and model and not model.entrypoint and not model.from_:
        weights = Weights(model.weights, model.trained_weights)
    return WEIGHT_BYTES * weights.all + trained * weights.trained if weights else 0


def offloaded(spec: JobSpec, replicas: int, weights: Weights | None = None) -> int:
    """Return the bytes of the state itself that each replica has in host memory (`trainer.memory.offload`).

    `weights` are those of a custom model.
    """
    if spec.trainer is None or spec.trainer.memory.offload is None:
        return 0
    copies = Degrees.of(spec.parallelism, replicas * spec.workers).replicate
    return _bytes(spec, MOMENTS_BYTES + GRADIENT_BYTES, weights) * copies // replicas


def _fits(spec: JobSpec, replicas: int, has: int) -> bool:
    if not replicas:  # no size is valid: `start.no_size` reports that
        return True
    return needed(spec, replicas) + offloaded(spec, replicas) <= has


def room(spec: JobSpec) -> int | None:
    """Return the bytes that a replica has for snapshots and for an offloaded state; None if there is no limit."""
    limits = amounts_of(spec.template.trainer.model_extra or {}, "limits")
    return bytes_of(limits.get("memory")) * 9 // 10 or None


def too_small(ctx: JobContext) -> Decision | None:
    """Stall the job if no size of it has room for its snapshots."""
    spec = ctx.spec
    if not spec.bundled or ctx.world.members or not (has := room(spec)) or _fits(spec, sizes.most(spec), has):
        return None
    return stalled("MemoryTooSmall", f"{_sentence(spec, sizes.most(spec), has)}. {_ADVICE}", Pods.NONE)


def events(ctx: JobContext) -> tuple[Event, ...]:
    """Return a warning, once when the job starts, if the snapshots fit now but would not after the job has shrunk."""
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
