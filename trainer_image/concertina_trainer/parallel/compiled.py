"""Compilation of the decoder's blocks by torch.compile.

Each block is compiled as one graph, for tensors of one shape. Blocks with the same source code and the same kinds of
inputs share the compiled code. FSDP gathers a block's weights before the compiled code runs and frees them after it.

A process that stays for another round keeps its compiled code. Under tensor or context parallelism, the code contains
the names of process groups, so these groups have the same names in each round (see `share_between_rounds`).

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import guards
from torch._dynamo.utils import calculate_time_spent, counters
from torch._library.opaque_object import get_opaque_obj_info
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _register_process_group

from concertina_trainer.config.trainer import Compile, TrainerConfig, compile_obstacle
from concertina_trainer.model.attention import COMPILER_OPTIONS
from concertina_trainer.model.decoder import Block, Decoder
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.parallel.group import DistContext

BACKEND: Mapping[str, Any] = {"backend": "inductor", "options": COMPILER_OPTIONS}
"""Arguments of torch.compile."""
VARIANTS = 64
"""Maximum number of graphs of one function. Each kind of layer has a graph with and one without gradients.

torch raises an error beyond the maximum. Its default is 8.
"""


def choose(config: TrainerConfig, cuda: bool) -> Compile:
    """Return what to compile: the job's setting, or by default the blocks, on a GPU and if they can be compiled.

    On a CPU, the default is no compilation: compilation takes minutes, and the faster code does not save as much time.
    """
    if config.compile is not None:
        return config.compile
    return Compile.blocks if cuda and not compile_obstacle(config) else Compile.never


def compile_blocks(model: Decoder) -> None:
    """Compile the model's blocks when they are called first.

    Call this function after tensor parallelism has split the weights. Hooks of a block, such as FSDP's, run outside of
    compiled code, because `forward` is compiled, and not the call of the module.
    """
    torch._dynamo.config.recompile_limit = VARIANTS
    for block in model.blocks.values():
        assert isinstance(block, Block)
        # The rows of an expert are as many as its tokens, and FSDP's hooks of the experts run within the block. So a
        # block with experts is compiled up to its feed-forward.
        method = "attended" if isinstance(block.feed_forward, MixtureOfExperts) else "forward"
        code = torch.compile(getattr(block, method), fullgraph=True, dynamic=False, **BACKEND)
        setattr(block, method, code)


def share_between_rounds(world: DistContext) -> None:
    """Let the blocks of this round use the code that this process has compiled in earlier rounds.

    Compiled code contains the names of the tensor group and of the context group, and torch finds the group by its name
    at each collective. This function gives both groups, and the group of all ranks, a second name, which is the same in
    each round. When a process leaves its round, torch forgets all names (`process_groups.leave`).

    Code for asynchronous tensor parallelism contains names that no other round uses (see `async_tensor`). This function
    drops such code of earlier rounds.

    Call this function before the model is built, because modules and DTensors take over the names.

    Raises:
        RuntimeError: When the installed torch decides in a different way whether to compile code for a mesh again.
    """
    if world.parallelism.async_tensor:
        torch._dynamo.reset()
    meshes = world.meshes
    if not (meshes.tensor or meshes.context):
        return
    _guard_by_position()
    # Keys of the compiler's cache also contain the mesh of all ranks.
    all_ranks = meshes.fsdp._get_root_mesh()
    for name, mesh in (("world", all_ranks), ("tensor", meshes.tensor), ("context", meshes.context)):
        if mesh is not None:
            group, shared = mesh.get_group(), GroupName(name)
            _register_process_group(shared, group)
            mesh._dim_group_names = [shared]
            all_ranks._pg_registry[shared] = group


@contextlib.contextmanager
def groups_released(world: DistContext) -> Iterator[None]:
    """Context manager that removes the round's process groups from its meshes when it exits.

    Compiled code keeps the meshes of the round in which it was compiled. With the meshes, it would keep the connections
    and threads of their groups.
    """
    try:
        yield
    finally:
        world.meshes.fsdp._get_root_mesh()._pg_registry.clear()


def _guard_by_position() -> None:
    """Make torch compile code for a mesh or a DTensor again only if a property in `of_mesh` or `of_spec` differs.

    torch's own choice of properties contains the ranks of the whole job and the names of dimensions, which differ in
    each round. It lacks the names of groups and this rank's position in the mesh, which are constants in the code.

    The keys of the compiler's cache lack this position too, so a rank could load the code of another position. This
    function adds the position to them.

    Raises:
        RuntimeError: When the installed torch decides in a different way whether to compile code for a mesh again.
    """
    info = get_opaque_obj_info(DeviceMesh)
    replaced = ((guards, "extract_dtensor_spec"), (guards, "check_dtensor_spec"), (DeviceMesh, "_stable_hash"))
    if info is None or not all(hasattr(*function) for function in replaced):
        raise RuntimeError(f"torch {torch.__version__} does not guard compiled code by its device meshes")

    def extract(guard: Any, value: object) -> list[Any]:
        return of_spec(value)

    def check(value: object, metadata: Any) -> bool:
        return bool(of_spec(value) == metadata)

    def key(mesh: DeviceMesh) -> str:
        return hashlib.sha256(repr((mesh._hash_key(), of_mesh(mesh))).encode()).hexdigest()

    info.guard_fn, guards.extract_dtensor_spec, guards.check_dtensor_spec = of_mesh, extract, check
    DeviceMesh._stable_hash = key  # type: ignore[assignment, method-assign]


def of_mesh(mesh: DeviceMesh) -> list[Any]:
    """Return the properties of a mesh that the compiled code of a block depends on."""
    return [mesh._layout, mesh._device_type, tuple(mesh._dim_group_names), mesh._coordinate_on_dim]


def of_spec(spec: Any) -> list[Any]:
    """Return the properties of a DTensorSpec that the compiled code of a block depends on.

    torch guards by the shape of the local tensor separately.
    """
    dtype = spec.tensor_meta and spec.tensor_meta.dtype
    return [*of_mesh(spec.mesh), spec.placements, spec.shard_order, dtype]


def graphs() -> int:
    """Return the number of graphs that this process has compiled so far."""
    return counters["stats"]["unique_graphs"]


def seconds() -> float:
    """Return the seconds that this process has spent on compilation so far."""
    return calculate_time_spent()["total_wall_time"]


def preload() -> None:
    """Import the compiler in the parent process that workers are forked from, if the job's blocks are compiled."""
    trainer = json.loads(os.environ.get("CONCERTINA_TRAINER") or "{}")
    if trainer.get("compile") == Compile.blocks or ("compile" not in trainer and torch.cuda.is_available()):
        importlib.import_module("torch._inductor.compile_fx")
