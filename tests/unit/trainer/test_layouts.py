"""A state that any layout has saved is read by any other: each rank finds exactly its own part of every tensor.

On a fake process group, which lets one process be any rank. Values say where they belong: initial weights are a
function of the place."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore

from concertina_protocol import SnapshotId
from concertina_state.format.read_plan import Box, reads
from concertina_state.format.shardfile import Header, ShardMetadata, StoredChunk
from concertina_trainer.config.model_config import ExpertsConfig
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.model.initial import initial_value
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState

NOBODY = ShardMetadata(SnapshotId(0, 0, "", 1), 0, 0, "", "")
CONFIG = TrainerConfig.model_validate(
    {
        "data": {"uri": "/none"},
        "model": {
            "layers": 4, "dim": 32, "heads": 4, "kvHeads": 2, "hiddenDim": 40, "vocabSize": 37, "sequenceLength": 32,
            "tieEmbeddings": False,
        },
    }
)  # fmt: skip
ROUNDS = itertools.count(1)
LAYOUTS = {
    "fsdp": (3, {}),
    "hsdp": (4, {"shard": 2}),
    "fsdp x tensor": (4, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
EXPERTS = {
    "fsdp": (4, {}),
    "expert x fsdp": (4, {"expert": 2}),
    "expert x fsdp within experts": (8, {"expert": 4}),
    "expert x pipeline": (4, {"expert": 2, "pipeline": 2}),
}
MORE_EXPERTS = {
    "expert x context": (4, {"expert": 2, "context": 2}),
    "expert x tensor": (4, {"expert": 2, "tensor": 2}),
    "tensor": (4, {"tensor": 2}),
    "expert x context x tensor": (8, {"expert": 4, "context": 2, "tensor": 2}),
    "expert x pipeline x tensor x copies": (8, {"expert": 2, "pipeline": 2, "tensor": 2, "shard": 1}),
    "copies": (2, {"shard": 1}),
    "expert over shard and context": (8, {"expert": 4, "context": 2}),
    "expert x pipeline x context": (12, {"expert": 2, "pipeline": 2, "context": 3, "shard": 2}),
    "interleaved": (4, {"expert": 2, "pipeline": 2, "schedule": "Interleaved1F1B"}),
}
MORE = {
    "one": (1, {}),
    "uneven": (5, {}),
    "copies": (3, {"shard": 1}),
    "tensor": (2, {"tensor": 2}),
    "hsdp x tensor": (8, {"tensor": 2, "shard": 2}),
    "context x tensor": (8, {"context": 2, "tensor": 2}),
    "pipeline x fsdp": (6, {"pipeline": 2}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
    "interleaved x tensor": (4, {"pipeline": 2, "tensor": 2, "schedule": "Interleaved1F1B"}),
    "pipeline x context x tensor": (16, {"pipeline": 2, "context": 2, "tensor": 2}),
}


def saved_by(world, parallelism, **changed):
    """Of each rank: the digest of the layout, and the values that it saves. `changed`: of the model."""
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update=changed)})
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            where = torch.device("cpu")
            given = ParallelismConfig.model_validate(parallelism)
            # Only the round tells meshes of this rank from those of another one, which DTensor's caches hold.
            context = DistContext.of(rank, world, where, given, config.model.experts is not None, next(ROUNDS))
            model = parallelized(config, context)
            state = TrainState(model, config, LocalOptimizer(model, config.optimizer, 0), context)
            state.initialise(config)
            yield state.digest, dict(zip(state.saved.layout.chunks, state.saved.tensors, strict=True))
        finally:
            dist.destroy_process_group()


def check_what_each_saves(saved):
    for name, ranks in saved.items():
        assert len({digest for digest, _ in ranks}) == 1, name
        for _, shard in ranks:
            for chunk, tensor in shard.items():
                if chunk.name.startswith(MODEL):
                    own = chunk.name.removeprefix(MODEL)
                    expected = initial_value(own, chunk.global_shape, Box.of(chunk), CONFIG.model, CONFIG.seed)
                    assert torch.equal(tensor, expected), (name, chunk)
                else:
                    assert not tensor.any()
    digests = [ranks[0][0] for ranks in saved.values()]
    assert len(set(digests)) == len(digests), "a layout's shards are not taken for another's"


def check_what_each_reads(saved):
    for writer, reader in itertools.product(saved, saved):
        headers, values = {}, {}
        for number, (_, shard) in enumerate(saved[writer]):
            headers[number] = Header(NOBODY, {chunk.name: StoredChunk(chunk, 0) for chunk in shard})
            values |= {(number, chunk.name): (Box.of(chunk), tensor) for chunk, tensor in shard.items()}
        for rank, (_, shard) in enumerate(saved[reader]):
            plan = reads(headers, list(shard))
            assert not plan.lacking, (writer, reader, rank)
            found = {chunk.name: torch.full(chunk.shape, torch.nan) for chunk in shard}
            for item in plan.items:
                stored, tensor = values[item.shard, item.target.name]
                found[item.target.name][item.box.within(Box.of(item.target))] = tensor[item.box.within(stored)]
            for chunk, tensor in shard.items():
                assert torch.equal(found[chunk.name], tensor), (writer, reader, rank, chunk.name)


def test_every_layout_is_read_by_every_other():
    saved = {name: list(saved_by(*layout, tie_embeddings=True)) for name, layout in LAYOUTS.items()}
    check_what_each_saves(saved)
    check_what_each_reads(saved)


def test_experts_are_dealt_out_and_read_likewise():
    experts = ExpertsConfig(count=4, hidden_dim=24, shared=1, first_dense=3, bias_rate=0.1)
    saved = {name: list(saved_by(*layout, experts=experts)) for name, layout in EXPERTS.items()}
    check_what_each_saves(saved)
    check_what_each_reads(saved)


@pytest.mark.long(law="tests/unit/trainer/test_layouts.py::test_experts_are_dealt_out_and_read_likewise")
def test_so_they_are_beside_all_dimensions():
    experts = ExpertsConfig(count=4, hidden_dim=24, shared=1, first_dense=1, bias_rate=0.1)
    layouts = EXPERTS | MORE_EXPERTS
    saved = {name: list(saved_by(*layout, experts=experts)) for name, layout in layouts.items()}
    check_what_each_saves(saved)
    check_what_each_reads(saved)


LAW = "tests/unit/trainer/test_layouts.py::test_every_layout_is_read_by_every_other"


@pytest.mark.long(law=LAW)
def test_a_rank_is_left_without_rows_of_what_is_cut_twice():
    """Of 9 rows over 2 tensor ranks and 4 others the last has none, where torch's own planner names a box of one."""
    layouts = {"one": (1, {}), "fsdp x tensor": (8, {"tensor": 2})}
    saved = {name: list(saved_by(*layout, vocab_size=9)) for name, layout in layouts.items()}
    check_what_each_saves(saved)
    check_what_each_reads(saved)


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("tied", [True, False])
def test_so_are_larger_and_stranger_ones(tied):
    saved = {name: list(saved_by(*layout, tie_embeddings=tied)) for name, layout in (LAYOUTS | MORE).items()}
    check_what_each_saves(saved)
    check_what_each_reads(saved)
