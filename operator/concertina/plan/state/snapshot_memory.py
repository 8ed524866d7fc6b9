"""Check that a job's snapshots fit into the memory of its pods, before any pod is created.

Decision "Memory for snapshots is checked first" gives the reason.

A rank's snapshot contains its part of the weights in float32, and the optimizer's moments for each trained weight. If a
job with adapters reads frozen weights from other files, these are not in the snapshot. For each of its workers, a
replica holds these snapshots:
  - three of its own;
  - one more while a snapshot is being copied to storage;
  - two copies of the previous replica's snapshots, unless there is only one replica.

When a round starts from memory, a replica holds two of its own snapshots and two of the previous replica's
(`concertina_agent.core.snapshot_index`). Once all ranks have restored, it holds one of each.

Snapshots may use nine tenths of the container's memory (`room`). The same memory also holds the agent's own files
(PROGRAM), the header of each shard (HEADER) and, for a tracked job, the data that its tracker has not accepted yet.

A round is a period in which a fixed set of replicas trains.
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
from concertina_trainer.config.model_config import FrozenDtype
from concertina_trainer.degrees import Degrees

SHIPPING = 1
WEIGHT_BYTES, HALF_BYTES, GRADIENT_BYTES = 4, 2, 4
"""Bytes of a weight in float32, of a weight in half precision, and of the gradient of a trained weight."""
PROGRAM = 4 << 20
"""Bytes for the files that the init container writes (1.6 MiB) and for the agent's own small files."""
HEADER = 1 << 20
"""Bytes for the header of each shard's file. The header needs 0.3 KiB for each tensor of the rank."""


class Weights(NamedTuple):
    all: int
    trained: int
    of_matrices: int
    """Number of trained weights that Muon updates: the elements of the blocks' matrices."""


def needed(spec: JobSpec, replicas: int, weights: Weights | None = None) -> int:
    """Return the bytes that each of `replicas` replicas uses in its memory volume.

    For a custom model, pass its numbers of weights as `weights`.
    """
    copies = SNAPSHOT_SLOTS + (SHIPPING if spec.checkpoint else 0) + (COPY_SLOTS if replicas > 1 else 0)
    shards = copies * _saved(spec, weights) // replicas + copies * spec.workers * HEADER
    return shards + PROGRAM + (spool.MOST_BYTES if spec.tracking else 0)


def _saved(spec: JobSpec, weights: Weights | None = None) -> int:
    """Return the bytes of one snapshot, summed over all ranks.

    A job with adapters does not save the frozen weights if it began with weight files. If it began with a checkpoint,
    it saves the frozen weights too. The operator can't see what is stored at the URI, and assumes weight files.
    """
    model, begin = spec.trainer and spec.trainer.model, spec.checkpoint
    elsewhere = model and model.lora and begin and (begin.init_from or begin.resume_from)
    return _bytes(spec, 0, weights, frozen=not elsewhere)


def _bytes(spec: JobSpec, trained: int, weights: Weights | None = None, frozen: bool = True) -> int:
    """Return the bytes of all weights and moments, plus `trained` bytes for each trained weight.

    If `frozen` is False, only trained weights count. For a custom model, and for a model that `model.from` describes,
    only the pods know the number of weights. The result is then 0 if `weights` is not given.
    """
    model = spec.trainer and spec.trainer.model
    if weights is None and model and not model.custom and not model.from_:
        weights = Weights(model.weights, model.trained_weights, model.matrix_weights)
    if weights is None:
        return 0
    # A quantized weight takes less. The embeddings, which are not quantized, take as much.
    is_half = model and model.lora and model.lora.frozen_dtype is not FrozenDtype.float32
    of_frozen = (HALF_BYTES if is_half else WEIGHT_BYTES) * (weights.all - weights.trained)
    moments = spec.trainer.optimizer.state_bytes(weights.trained, weights.of_matrices) if spec.trainer else 0
    return (WEIGHT_BYTES + trained) * weights.trained + moments + (of_frozen if frozen else 0)


def offloaded(spec: JobSpec, replicas: int, weights: Weights | None = None) -> int:
    """Return the bytes of training state that each replica keeps in host memory (`trainer.memory.offload`).

    For a custom model, pass its numbers of weights as `weights`.
    """
    if spec.trainer is None or spec.trainer.memory.offload is None:
        return 0
    copies = Degrees.of(spec.parallelism, replicas * spec.workers).replicate
    return _bytes(spec, GRADIENT_BYTES, weights) * copies // replicas


def _fits(spec: JobSpec, replicas: int, has: int) -> bool:
    if not replicas:  # no size is valid, which `start.no_size` reports
        return True
    return needed(spec, replicas) + offloaded(spec, replicas) <= has


def room(spec: JobSpec) -> int | None:
    """Return the bytes that each replica has for snapshots and offloaded state; None if its memory is not limited."""
    limits = amounts_of(spec.template.trainer.model_extra or {}, "limits")
    return bytes_of(limits.get("memory")) * 9 // 10 or None


def too_small(ctx: JobContext) -> Decision | None:
    """Stall the job if its snapshots do not fit into its pods' memory, even with all requested replicas.

    With more replicas, each one holds a smaller part of the state.
    """
    spec = ctx.spec
    if not spec.bundled or ctx.world.members or not (has := room(spec)) or _fits(spec, sizes.most(spec), has):
        return None
    return stalled("MemoryTooSmall", f"{_sentence(spec, sizes.most(spec), has)}. {_ADVICE}", Pods.NONE)


def events(ctx: JobContext) -> tuple[Event, ...]:
    """Return a warning at the start of a job whose snapshots do not fit into its pods at `minReplicas`.

    With fewer replicas, each one holds a larger part of the state.
    """
    spec = ctx.spec
    if not spec.bundled or ctx.status.start_time or not (has := room(spec)) or _fits(spec, sizes.least(spec), has):
        return ()
    return (Event("Warning", "MemoryTight", f"{_sentence(spec, sizes.least(spec), has)}. {_ADVICE}"),)


_ADVICE = "Raise resources.limits.memory of the container trainer, or raise replicas and elastic.minReplicas"


def _sentence(spec: JobSpec, replicas: int, has: int) -> str:
    besides = offloaded(spec, replicas)
    return (
        f"with {replicas} replicas the snapshots of each replica take {needed(spec, replicas) / 2**20:,.0f} MiB "
        f"(of {_saved(spec) / 2**20:,.0f} MiB of state in total), "
        + (f"its offloaded state {besides / 2**20:,.0f} MiB, " if besides else "")
        + f"but only nine tenths of the memory limit, {has / 2**20:,.0f} MiB, are available"
    )
