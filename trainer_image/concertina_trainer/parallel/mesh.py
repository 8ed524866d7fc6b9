"""Device meshes of a world: which ranks share what."""

from __future__ import annotations

import dataclasses
import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.degrees import Degrees


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Device meshes of a world."""

    fsdp: DeviceMesh
    """Mesh over which weights are cut, with one dimension or, with copies, two.

    Ranks of a context group have parts too.
    """
    pipeline: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    """Ranks with tokens of the same sequences, in a model with experts."""
    expert: DeviceMesh | None = None
    """Mesh over which experts are distributed."""
    expert_fsdp: DeviceMesh | None = None
    """Mesh over which weights of experts are cut, if it is not `fsdp`."""

    @staticmethod
    def of(degrees: Degrees, device: str, parallelism: ParallelismConfig, routed: bool, round: int) -> Meshes:
        """Return the meshes of the process group of all ranks; `routed` is for a model with experts."""
        names = _Names(round)
        world = init_device_mesh(device, (math.prod(degrees),), mesh_dim_names=names("data"))
        meshes = _dense(world, degrees, names)
        return _with_experts(meshes, world, degrees, parallelism, names) if routed else meshes


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of dimensions, which are those of a round, so that no mesh equals one of another round.

    DTensor caches placements, shapes and plans of communication by mesh, in each thread. Meshes are equal if their
    ranks and names are. In an equal mesh of an earlier round this process may have had another place, and the cached
    values would be silently wrong (decision "A survivor keeps its process").
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
    """Add the meshes of experts, which are cut over all ranks of a stage that have tokens of their own.

    Between layers, the ranks of a tensor group have some tokens of each sequence, too.
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
