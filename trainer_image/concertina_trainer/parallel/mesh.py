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
    def of(degrees: Degrees, device: str, parallelism: ParallelismConfig, routed: bool) -> Meshes:
        """Return the meshes of the process group of all ranks; `routed` is for a model with experts."""
        world = init_device_mesh(device, (math.prod(degrees),), mesh_dim_names=("data",))
        meshes = _dense(world, degrees)
        return _with_experts(meshes, world, degrees, parallelism) if routed else meshes


def _dense(world: DeviceMesh, degrees: Degrees) -> Meshes:
    if degrees.replicate == degrees.group == 1:
        return Meshes(world)
    view = world._unflatten(0, tuple(degrees), Degrees._fields)
    fsdp = view["shard"]
    if degrees.context > 1:
        fsdp = view["shard", "context"]._flatten("fsdp")
    if degrees.replicate > 1:
        fsdp = DeviceMesh._concatenate([view["replicate"], fsdp])
    return Meshes(fsdp, *(view[name] if getattr(degrees, name) > 1 else None for name in Degrees._fields[2:]))


def _with_experts(meshes: Meshes, world: DeviceMesh, degrees: Degrees, parallelism: ParallelismConfig) -> Meshes:
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
    view = world._unflatten(0, tuple(sizes.values()), tuple(sizes))
    fsdp = view["expert_shard", "expert_sequence"]._flatten("expert_fsdp")
    if degrees.replicate > 1:
        fsdp = DeviceMesh._concatenate([view["expert_copies"], fsdp])
    if meshes.context and meshes.tensor:
        meshes = dataclasses.replace(meshes, sequence=view["expert_sequence", "expert_inner"]._flatten("sequence"))
    expert = view["expert_outer", "expert_inner"]._flatten("expert") if parallelism.expert > 1 else None
    return dataclasses.replace(meshes, expert=expert, expert_fsdp=fsdp)
