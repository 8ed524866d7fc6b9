"""Device meshes of a round: the groups of ranks over which weights, sequences and experts are split.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import GroupName

from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.degrees import Degrees


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Device meshes of a round, as this rank sees them.

    Every mesh except `fsdp` is None if its dimension has only one rank, or if the model does not need it.

    A round is a period in which a fixed set of replicas trains.
    """

    fsdp: DeviceMesh
    """Mesh over which FSDP shards weights. Its two dimensions are copies and shards if there are several copies (HSDP).

    The ranks of a context group hold different shards too.
    """
    pipeline: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    """Ranks that have different tokens of the same sequences, in a model with experts."""
    expert: DeviceMesh | None = None
    """Mesh over which the experts of a layer are distributed."""
    expert_fsdp: DeviceMesh | None = None
    """Mesh over which FSDP shards the weights of experts, or None if it is the mesh `fsdp`."""

    @staticmethod
    def of(degrees: Degrees, device: str, parallelism: ParallelismConfig, routed: bool, round: int) -> Meshes:
        """Build the meshes from the process group of all ranks. `routed` says whether the model has experts."""
        names = _Names(round)
        world = init_device_mesh(device, (math.prod(degrees),), mesh_dim_names=names("data"))
        meshes = _dense(world, degrees, names)
        return _with_experts(meshes, world, degrees, parallelism, names) if routed else meshes


def group_name(mesh: DeviceMesh) -> GroupName:
    """Return the name of the group of a mesh with one dimension, by which functional collectives find the group."""
    (name,) = mesh._dim_group_names
    return name


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of mesh dimensions. They contain the number of the round, so that no two rounds have equal meshes.

    DTensor caches placements, shapes and plans of communication by mesh, in each thread. Two meshes are equal if their
    ranks and names are equal. A process can take part in several rounds, with another rank in each. If a new mesh were
    equal to one of an earlier round, DTensor would use values that were cached for the earlier rank, and results would
    be wrong without an error (decision "A survivor keeps its process").

    A round is a period in which a fixed set of replicas trains.
    """

    round: int

    def __call__(self, *names: str) -> tuple[str, ...]:
        return tuple(f"{name} of round {self.round}" for name in names)


def _dense(world: DeviceMesh, degrees: Degrees, names: _Names) -> Meshes:
    if degrees.replicate == degrees.group == 1:
        return Meshes(world)
    view = world._unflatten(0, tuple(degrees), names(*Degrees._fields))
    fsdp = view[names("shard")]
    if degrees.context > 1:
        fsdp = view[names("shard", "context")]._flatten(*names("fsdp"))
    if degrees.replicate > 1:
        fsdp = DeviceMesh._concatenate([view[names("replicate")], fsdp])
    return Meshes(fsdp, *(view[names(name)] if getattr(degrees, name) > 1 else None for name in Degrees._fields[2:]))


def _with_experts(
    meshes: Meshes, world: DeviceMesh, degrees: Degrees, parallelism: ParallelismConfig, names: _Names
) -> Meshes:
    """Add the meshes of experts to the meshes of the other weights.

    Experts are distributed over the ranks of a pipeline stage that have different tokens. The ranks of a tensor group
    also have different tokens, because the group splits each sequence between layers.
    """
    meshes = dataclasses.replace(meshes, sequence=meshes.context or meshes.tensor)
    if parallelism.expert == degrees.tensor == 1:
        return meshes
    shards, together = parallelism.expert_shards, degrees.context * degrees.tensor
    within = parallelism.expert // shards
    sizes = {
        "expert_copies": degrees.replicate,
        "expert_shard": degrees.shard // shards,
        "expert_outer": shards,
        "expert_stages": degrees.pipeline,
        "expert_sequence": together // within,
        "expert_inner": within,
    }
    view = world._unflatten(0, tuple(sizes.values()), names(*sizes))
    fsdp = view[names("expert_shard", "expert_sequence")]._flatten(*names("expert_fsdp"))
    if degrees.replicate > 1:
        fsdp = DeviceMesh._concatenate([view[names("expert_copies")], fsdp])
    if meshes.context and meshes.tensor:
        sequence = view[names("expert_sequence", "expert_inner")]._flatten(*names("sequence"))
        meshes = dataclasses.replace(meshes, sequence=sequence)
    expert = view[names("expert_outer", "expert_inner")]._flatten(*names("expert")) if parallelism.expert > 1 else None
    return dataclasses.replace(meshes, expert=expert, expert_fsdp=fsdp)
