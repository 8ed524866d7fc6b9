"""The device meshes of a world: which ranks share what."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from concertina_trainer.degrees import Degrees


@dataclass(frozen=True)
class Meshes:
    fsdp: DeviceMesh
    """Over which weights are cut, by one dimension or, with copies, by two; ranks of a context group too have other
    parts each."""
    pipeline: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    """Over which experts are dealt out."""
    expert_fsdp: DeviceMesh | None = None
    """Over which weights of experts are cut then, instead of `fsdp`."""

    @staticmethod
    def of(degrees: Degrees, device: str, expert: int = 1) -> Meshes:
        """Of the process group of all ranks; `expert`: of the ranks that shard one copy so many neighbours have
        different experts."""
        world = init_device_mesh(device, (math.prod(degrees),), mesh_dim_names=("data",))
        if expert > 1:
            return _with_experts(world, degrees, expert)
        if degrees.replicate == degrees.group == 1:
            return Meshes(world)
        view = world._unflatten(0, tuple(degrees), Degrees._fields)
        fsdp = view["shard"]
        if degrees.context > 1:
            fsdp = view["shard", "context"]._flatten("fsdp")
        if degrees.replicate > 1:
            fsdp = DeviceMesh._concatenate([view["replicate"], fsdp])
        return Meshes(fsdp, *(view[name] if getattr(degrees, name) > 1 else None for name in Degrees._fields[2:]))


def _with_experts(world: DeviceMesh, degrees: Degrees, expert: int) -> Meshes:
    """Of data parallelism alone, as yet (`layouts`)."""
    copies, shard = degrees.replicate, degrees.shard
    dense = world if copies == 1 else world._unflatten(0, (copies, shard), ("replicate", "shard"))
    names = ("replicate", "expert_shard", "expert")
    view = world._unflatten(0, (copies, shard // expert, expert), names)
    fsdp = view["expert_shard"]
    if copies > 1:
        fsdp = DeviceMesh._concatenate([view["replicate"], fsdp])
    return Meshes(dense, expert=view["expert"], expert_fsdp=fsdp)
