"""The process group of a round, in a process that joins one after the other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore
from torch.distributed import TCPStore, distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from concertina_state import process_groups
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.parallel import compiled, group
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.mesh import group_name

HERE = "127.0.0.1"


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(HERE, 0, is_master=True, wait_for_workers=False)


def test_no_group_has_the_name_of_one_of_an_earlier_round(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what has kept a name finds no group under it, and never another one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: list[set[str]] = []
    for round in (4, 5):
        environment = {"RANK": "0", "WORLD_SIZE": "1", "CONCERTINA_ROUND": str(round)}
        environment |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(store.port)}
        group.join(environment, ParallelismConfig(), routed=False)
        dist.new_group([0])
        names.append(set(distributed_c10d._world.pg_names.values()))
        process_groups.leave()
    first, second = names
    assert len(first) == len(second) >= 2
    assert not first & second


def test_what_is_cached_of_a_rounds_meshes_is_freed_with_its_groups() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    meshes = DistContext.of(1, 2, torch.device("cpu"), ParallelismConfig(tensor=2), round=1).meshes
    assert meshes.tensor is not None
    mesh = weakref.ref(meshes.tensor)
    matrix = distribute_tensor(torch.ones(4, 4), meshes.tensor, [Shard(0)], src_data_rank=None)
    matrix.mm(matrix).redistribute(placements=[Replicate()])
    del meshes, matrix
    gc.collect()
    assert mesh() is not None
    process_groups.leave()
    gc.collect()
    assert mesh() is None


def test_compiled_code_finds_the_group_of_its_round_and_is_for_one_position() -> None:
    """Code of rank 1 of two serves rank 3 of four, which has the same position in its tensor group, but not rank 2."""
    code = []
    for round, (rank, size) in enumerate(((1, 2), (3, 4), (2, 4))):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        world = DistContext.of(rank, size, torch.device("cpu"), ParallelismConfig(tensor=2), round=round)
        mesh = world.meshes.tensor
        assert mesh is not None
        own = mesh.get_group()
        compiled.share_between_rounds(world)
        assert distributed_c10d._resolve_process_group(group_name(mesh)) is mesh.get_group() is own
        code.append(compiled.of_mesh(mesh))
        process_groups.leave()
        with pytest.raises(RuntimeError, match="tensor"):
            distributed_c10d._resolve_process_group(group_name(mesh))
    assert code[0] == code[1] != code[2]


def test_the_compilers_cache_has_code_for_one_position() -> None:
    """The key of cached code has a hash of each DTensor. Ranks 1 and 3 have the same position, and rank 2 another."""
    hashes = []
    for rank in (1, 3, 2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        world = DistContext.of(rank, 4, torch.device("cpu"), ParallelismConfig(tensor=2))
        compiled.share_between_rounds(world)
        assert world.meshes.tensor is not None
        weight = DTensor.from_local(torch.ones(2), world.meshes.tensor, [Replicate()])
        hashes.append(weight._stable_hash_for_caching())
        process_groups.leave()
    assert hashes[0] == hashes[1] != hashes[2]
