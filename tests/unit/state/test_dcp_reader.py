"""`trainingjob.dcp.Reader`: plain `dcp.load` reads what `trainingjob.State` has saved."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import trainingjob
import trainingjob.dcp
from concertina_protocol import SnapshotId
from concertina_protocol.sidecar import read_sidecar
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import BLOCK, CheckpointKey
from concertina_state.checkpoints.retention import remove
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, publish, ship
from trainingjob import _dcp_entries, _state

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch):
    """Let each test begin like a process, without any State."""
    monkeypatch.setattr(_state, "_only", None)


def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1 + seed, weight_decay=0.01 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def trained(seed, steps):
    model, optimizer, scheduler = made(seed)
    for _ in range(steps):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.fixture
def saved(tmp_path):
    """Save a State, and return the checkpoint's run and the saved objects."""
    model, optimizer, scheduler = trained(1, 3)
    tree = {"list": [torch.arange(3.0), 5], "deep": {"counts": torch.arange(4)}, "name": "x"}
    state = trainingjob.State(
        folder=str(tmp_path / "memory"), model=model, optimizer=optimizer, scheduler=scheduler, tree=tree
    )
    state.restore()
    optimizer.step()
    state.commit(2, durable=True)
    [slot] = [path for path in tmp_path.glob("memory/*/shard-0/slot-?") if read_sidecar(path)]
    id, folder = read_sidecar(slot).id, ObjectPrefix(f"file://{tmp_path}/run", create=True)
    ship(folder, "u1", id, 0, slot)
    publish(folder, Destination(folder.uri), "u1", id, True)
    return folder.uri, model, optimizer, scheduler, tree


def test_a_script_of_torch_alone_goes_on_from_a_state(saved):
    """Load weights, buffers, moments, options of the groups, and the scheduler into an optimizer of other values."""
    uri, model, optimizer, scheduler, _ = saved
    other, their_optimizer, their_scheduler = trained(5, 1)
    weights, moments = get_state_dict(other, their_optimizer, options=FLAT)
    state = {"model": weights, "optimizer": moments, "scheduler": their_scheduler}
    dcp.load(state, storage_reader=trainingjob.dcp.Reader(uri))
    set_state_dict(other, their_optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
    expected = get_state_dict(model, optimizer, options=FLAT)
    found = get_state_dict(other, their_optimizer, options=FLAT)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found[1]["state.0.weight.step"] == 3
    assert their_scheduler.state_dict() == scheduler.state_dict()


def test_arrays_within_dicts_have_the_keys_that_dcp_gives_them(saved):
    uri, *_, tree = saved
    found = {"tree": {"list": [torch.zeros(3), 0], "deep": {"counts": torch.zeros(4, dtype=torch.int64)}, "name": ""}}
    dcp.load(found, storage_reader=trainingjob.dcp.Reader(uri))
    assert found["tree"].pop("name") == tree.pop("name")
    torch.testing.assert_close(found["tree"], tree)


def test_a_whole_checkpoint_is_read_without_knowing_its_names(saved):
    """Read it as torch's dcp_to_torch_save does."""
    uri, model, optimizer, *_ = saved
    found = {}
    _load_state_dict(found, trainingjob.dcp.Reader(uri), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert found.keys() == {"model", "optimizer", "scheduler", "tree"}
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    torch.testing.assert_close(dict(found["model"]), dict(weights), rtol=0, atol=0)
    torch.testing.assert_close(dict(found["optimizer"]), dict(moments), rtol=0, atol=0)


def test_what_a_checkpoint_does_not_have_is_named(saved):
    uri, *_ = saved
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.3\.weight"):
        dcp.load({"model": {"3.weight": torch.zeros(2)}}, storage_reader=trainingjob.dcp.Reader(uri))
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for model\.0\.weight"):
        dcp.load({"model": {"0.weight": torch.zeros(2, 2)}}, storage_reader=trainingjob.dcp.Reader(uri))


def test_a_checkpoint_is_not_deleted_while_it_is_read(saved):
    uri, model, *_ = saved
    folder, seen = ObjectPrefix(uri), []

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            now = max(entry.at for entry in folder.entries().values())
            latest = read_latest(folder)
            seen.append(remove(folder, CheckpointKey(latest.uid, latest.round, latest.step), now))
            return super().resolve_tensor(read_item)

    dcp.load({"model": model.state_dict()}, storage_reader=trainingjob.dcp.Reader(uri), planner=Planner())
    assert seen
    assert not any(seen)
    assert not [key for key in folder.entries() if "/readers/" in key]


def test_only_the_blocks_of_the_requested_rows_are_read(tmp_path, monkeypatch):
    rows, columns = 64, BLOCK // 16
    id, whole = SnapshotId(1, 5, "layout", 1), torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    layout = Layout([Chunk("model.x", "I32", (0, 0), (rows, columns), (rows, columns))], trainer="{}")
    slot, folder = tmp_path / "slot", ObjectPrefix(f"file://{tmp_path}/run", create=True)
    slot.write_bytes(layout.header(ShardMetadata(id, 0, 35, "config", "data")) + whole.numpy().tobytes())
    ship(folder, "u1", id, 0, slot)
    publish(folder, Destination(folder.uri), "u1", id, True)
    reader, index = trainingjob.dcp.Reader(folder.uri), MetadataIndex("model.x", [0, 0])
    begin, lengths = torch.Size([41, 3]), torch.Size([2, 5])
    target, sizes = torch.zeros(4, 6, dtype=torch.int64), []

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return target[1:3, :5]

    reader.read_metadata()
    read_into = ObjectPrefix.read_into
    monkeypatch.setattr(
        ObjectPrefix, "read_into", lambda *given: (sizes.append(sum(map(len, given[3]))), read_into(*given))[1]
    )
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([1, 0]), index, begin, lengths)
    plan = reader.prepare_local_plan(LoadPlan([item]))
    reader.read_data(plan, Planner()).wait()
    assert torch.equal(target[1:3, :5], whole[41:43, 3:8].long())
    assert target.count_nonzero() == 10
    assert sum(sizes) <= 2 * BLOCK, "of 16 blocks"


def test_ranks_that_found_different_checkpoints_are_told():
    plans = [LoadPlan([], storage_data=f"s3://b/{step}") for step in (1, 2)]
    with pytest.raises(InvalidInput, match=r"different checkpoints \(s3://b/1, s3://b/2\): load again"):
        trainingjob.dcp.Reader("s3://b").prepare_global_plan(plans)


def test_moments_of_any_optimizer_of_the_bundled_trainer_have_the_names_of_torch():
    names = (
        "model.a.weight",
        "optimizer.square_avg.a.weight",
        "optimizer.momentum_buffer.a.weight",
        "optimizer.ema.a.weight",
    )
    chunks = [Chunk(name, "F32", (0,), (2,), (2,)) for name in names]
    entries = {".".join(entry.path): entry for entry in _dcp_entries._of_trainer(chunks, 7)}
    assert entries.pop("optimizer.state.a.weight.step").value == 7
    assert {key: entry.name for key, entry in entries.items()} == {
        "model.a.weight": names[0], "optimizer.state.a.weight.square_avg": names[1],
        "optimizer.state.a.weight.momentum_buffer": names[2], "optimizer.state.a.weight.ema": names[3],
    }  # fmt: skip
