"""`trainingjob.State` in one process: all saved state is restored, and what does not match is reported."""

import dataclasses
import json
import random
from collections import Counter

import pytest
import torch

import trainingjob
from concertina_protocol import FailureReason, JobHistory, Restore, RestoreSource, SnapshotId
from concertina_protocol.sidecar import read_sidecar
from concertina_protocol.worker_channel import Committed, Fault, Start
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import CheckpointKey
from concertina_state.checkpoints.retention import remove
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import ShardMetadata, header_length, parse_header
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.saved import find
from concertina_state.state_index import StateIndex
from concertina_state.uploader import Destination, publish, ship
from trainingjob import _connection, _state
from trainingjob._folder import Folder
from trainingjob._objects import RandomNumbers
from trainingjob._torch_objects import torch_adapters_of
from trainingjob._values import decode, encode


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch):
    """Let each test begin like a process, without any State."""
    monkeypatch.setattr(_state, "_only", None)


def saved(folder, **objects):
    state = trainingjob.State(folder=str(folder), **objects)
    state.restore()
    for optimizer in objects.values():
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()
    state.commit(0, durable=True)


def restored(folder, **objects):
    assert trainingjob.State(folder=str(folder), **objects).restore() == 1


class Shards:
    """Shards that the ranks of a world have saved."""

    def __init__(self, catalogues):
        self.id = SnapshotId(1, 7, "layout", len(catalogues))
        metadata = [ShardMetadata(self.id, rank, 70, "", "") for rank in range(len(catalogues))]
        self._texts = [each.saved.layout.header(facts) for each, facts in zip(catalogues, metadata, strict=True)]

    def open(self, shard):
        return Opened(self.header(shard))

    def header(self, shard):
        return parse_header(self._texts[shard][8:])


class Opened:
    def __init__(self, header):
        self.header = header


@pytest.mark.parametrize("world", range(2, 9))
def test_ranks_that_read_nothing_know_what_is_restored(world):
    """Of the script of docs/script-state.md: a few of the ranks of five and more have no row of its one wide weight."""
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    adapters = torch_adapters_of({"model": model, "optimizer": optimizer}, {})
    arrays = {f"{name}.{key}": array for name, adapter in adapters.items() for key, array in adapter.arrays().items()}
    own = torch.zeros(9, dtype=torch.uint8)
    catalogues = [StateIndex(arrays, {f"rank-{rank}": own}, rank, world) for rank in range(world)]
    shards = Shards(catalogues)
    read = []
    for rank, catalogue in enumerate(catalogues):
        for alone in (rank, None):
            found = find(shards, alone, lambda held, catalogue=catalogue: catalogue.plan(held, ""))
            assert (found.metadata.id, found.metadata.position) == (shards.id, 70)
            read.append(len(found.plan.shards))
    assert (0 in read) == (world >= 5)


def test_a_state_without_arrays_comes_back(tmp_path):
    kept = {"seen": 3, "names": ["a"]}
    saved(tmp_path, kept=kept)
    found = {"seen": 0, "names": []}
    restored(tmp_path, kept=found)
    assert found == kept


class Agent:
    """Agent that records its messages."""

    def __init__(self):
        self.told = []
        self.send = self.told.append


def trained(*groups):
    """Return a model and its optimizer, with one group for each parameter, or with one for all."""
    model = torch.nn.Linear(2, 2)
    parameters = [{"params": [getattr(model, name) for name in group]} for group in groups]
    return {"model": model, "optimizer": torch.optim.Adam(parameters or model.parameters())}


def with_scheduler():
    found = trained()
    return {**found, "scheduler": torch.optim.lr_scheduler.StepLR(found["optimizer"], 1)}


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        ({"model": torch.nn.Linear(2, 2)}, trained(), "the saved state of step 1 has no optimizer: give the script"),
        (trained(), with_scheduler(), "the saved state of step 1 has no scheduler: give the script the objects"),
        (
            trained(["weight"]),
            trained(),
            "optimizer now has model.bias, which no group had when the optimizer was saved: give the script",
        ),
        (
            trained(),
            trained(["weight"]),
            r"optimizer was saved with model.bias, .* now: add it \(optimizer.add_param_group\) before State.restore",
        ),
        (
            {"kept": {"a": torch.zeros(2), "b": 1}},
            {"kept": {"a": 1, "b": 1}},
            "a was saved as an array, but is not an array now: give the script the objects",
        ),
    ],
)
def test_a_state_of_other_objects_is_refused_and_the_job_is_told(tmp_path, monkeypatch, before, now, sentence):
    saved(tmp_path, **before)
    state, agent = trainingjob.State(folder=str(tmp_path), **now), Agent()
    monkeypatch.setattr(_connection, "agent_channel", lambda: agent)
    with pytest.raises(InvalidInput, match=sentence) as refused:
        state.restore()
    assert agent.told == [Fault(FailureReason.INVALID_INPUT, str(refused.value))]


class Scaled(torch.nn.Module):
    """Module of which two weights have the same name without the prefixes that wrappers add."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.zeros(3, 3))
        self.submodule = torch.nn.Linear(1, 1)


def filled(module):
    """Return a model with other numbers in each tensor, after a step of Adam."""
    optimizer = torch.optim.Adam(module.parameters())
    for number, parameter in enumerate(module.parameters(), 1):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    with torch.no_grad():
        for number, value in enumerate(module.parameters()):
            value.fill_(number)
    return {"model": module, "optimizer": optimizer}


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPED = {
    "plain": lambda module: module,
    "compiled": torch.compile,
    "DataParallel": torch.nn.DataParallel,
    "compiled DataParallel": lambda module: torch.compile(torch.nn.DataParallel(module)),
}


@pytest.mark.parametrize("before", WRAPPED)
@pytest.mark.parametrize("now", ["plain", "compiled DataParallel"])
def test_weights_that_only_wrappers_names_tell_apart_come_back(tmp_path, before, now):
    old, new = Scaled(), Scaled()
    trained = filled(torch.nn.Sequential(WRAPPED[before](old)))
    saved(tmp_path, **trained)
    again = {"model": torch.nn.Sequential(WRAPPED[now](new)), "optimizer": torch.optim.Adam(new.parameters())}
    restored(tmp_path, **again)
    for one, other in zip(old.parameters(), new.parameters(), strict=True):
        assert other.tolist() == one.tolist()
        moments = [each["optimizer"].state[weight] for each, weight in ((trained, one), (again, other))]
        assert moments[0]["exp_avg"].tolist() == moments[1]["exp_avg"].tolist()


def test_a_wrapper_of_ones_own_may_come_and_go(tmp_path):
    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    saved(tmp_path, model=Wrapper(old))
    restored(tmp_path, model=new)
    assert new.weight.tolist() == old.weight.tolist()


class Counting(torch.nn.Module):
    def __init__(self, count, kind):
        super().__init__()
        self.weight, self.count, self.kind = torch.nn.Parameter(torch.zeros(2)), count, kind

    def get_extra_state(self):
        return self.kind(self.count)

    def set_extra_state(self, state):
        self.count = int(state)


@pytest.mark.parametrize("kind", [torch.tensor, str])
def test_extra_state_comes_back_as_what_it_was(tmp_path, kind):
    new = torch.nn.Sequential(Counting(0, kind))
    saved(tmp_path, model=torch.nn.Sequential(Counting(7, kind)))
    restored(tmp_path, model=new)
    assert new[0].count == 7


class OfItsOwn(torch.nn.Linear):
    """Module whose own state_dict takes no arguments."""

    def state_dict(self):
        return {"weight": self.weight.detach(), "bias": self.bias.detach()}


def test_a_module_with_a_state_dict_of_its_own_is_kept(tmp_path):
    before, after = OfItsOwn(2, 2), OfItsOwn(2, 2)
    saved(tmp_path, model=before)
    restored(tmp_path, model=after)
    assert torch.equal(after.weight, before.weight)


def test_weights_that_were_moved_elsewhere_are_saved_as_they_are_now(tmp_path):
    before, after = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    state = trainingjob.State(folder=str(tmp_path), model=before)
    state.restore()
    state.commit(0, durable=True)
    before.weight.data = torch.full((2, 2), 7.0)  # The parameter is the same, in other memory.
    state.commit(1, durable=True)
    del state  # its process ends
    assert trainingjob.State(folder=str(tmp_path), model=after).restore() == 2
    assert after.weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_random_numbers_go_on():
    random.seed(5)
    saved_state = RandomNumbers().state_dict()
    drawn = [random.random() for _ in range(3)]
    random.seed(6)
    RandomNumbers().load_state_dict(decode(encode(saved_state, "random")))
    assert [random.random() for _ in range(3)] == drawn


def test_extra_state_that_nothing_takes_any_more_is_said(tmp_path):
    saved(tmp_path, model=Counting(7, str))
    plain = torch.nn.Module()
    plain.weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(InvalidInput, match="a module no longer has _extra_state, which was saved: give the script"):
        restored(tmp_path, model=plain)


class Stepping(torch.optim.SGD):
    def step(self):
        self.state["all"].setdefault("steps", []).append(torch.ones(2))


def test_what_an_optimizer_keeps_beside_parameters_comes_back(tmp_path):
    def made():
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": Stepping(model.parameters(), lr=0.1)}

    old, new = made(), made()
    saved(tmp_path, **old)
    restored(tmp_path, **new)
    assert [each.tolist() for each in new["optimizer"].state["all"]["steps"]] == [[1, 1]]


def test_zero_redundancy_optimizers_are_refused():
    class Zero(torch.optim.SGD):
        __module__ = "torch.distributed.optim.zero_redundancy_optimizer"

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"optimizer is a ZeroRedundancyOptimizer, .* with fully_shard"):
        trainingjob.State(model=model, optimizer=Zero(model.parameters(), lr=0.1))


def test_what_was_taken_out_of_a_dict_stays_out(tmp_path):
    def begun():
        deep = {"array": torch.zeros(2), "todo": {"a": 1, "b": 2}}
        return {"todo": {"a": 1, "b": 2}, "counts": Counter(a=1), "deep": deep, "list": [1, 2], "new": 0}

    kept, found = begun(), begun()
    del kept["todo"]["a"], kept["deep"]["todo"]["b"], kept["list"][0], kept["new"]
    kept["counts"] = Counter(b=2)
    kept["todo"]["c"] = Counter("cc")
    saved(tmp_path, kept=kept)
    todo = found["todo"]
    restored(tmp_path, kept=found)
    array = found["deep"].pop("array")
    del kept["deep"]["array"]
    assert array.tolist() == [0, 0]
    assert found == {**kept, "new": 0}, "a script may keep more than it did"
    assert found["todo"] is todo
    assert (type(found["counts"]), type(todo["c"])) == (Counter, Counter)


def test_a_schedulers_milestones_are_counted_on(tmp_path):
    def made():
        of_torch = torch.optim.lr_scheduler
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        warm, steps = of_torch.LinearLR(optimizer, total_iters=3), of_torch.MultiStepLR(optimizer, [2, 4])
        return {"optimizer": optimizer, "scheduler": of_torch.SequentialLR(optimizer, [warm, steps], milestones=[3])}

    def rates(objects):
        found = []
        for _ in range(8):
            objects["optimizer"].step()
            objects["scheduler"].step()
            found += objects["scheduler"].get_last_lr()
        return found

    old, new = made(), made()
    saved(tmp_path, **old)
    restored(tmp_path, **new)
    assert rates(new) == rates(old)


class Job:
    """Agent of a job with one process. Its state is in a folder, and it starts with the value of `spec.checkpoint`."""

    def __init__(self, folder):
        self._folder = Folder(folder, trainingjob.world(), lambda value: value)

    def start(self):
        return Start(Restore(RestoreSource.FRESH), 1, "u2")

    def __getattr__(self, name):
        return getattr(self._folder, name)


class InMemoryOf:
    """Agent of round 2, with the snapshots in memory that the previous round has committed."""

    round, durable, images, history = 2, None, (), JobHistory()

    def __init__(self, folder):
        [self._slot] = [path for path in folder.glob("round-1/shard-0/slot-?") if read_sidecar(path)]
        self.held, self.snapshots, self.told = read_sidecar(self._slot).id, folder / "round-2", []
        self.send = self.told.append

    def start(self):
        return Start(Restore(RestoreSource.MEMORY, self.held.step, self.held), 2, "u")

    def request(self, message, kind):
        return kind(str(self._slot))

    def count_samples_by(self, samples):
        pass

    def report_restored(self, step, source):
        pass

    @property
    def committed(self):
        return [each.id for each in self.told if isinstance(each, Committed)]


@pytest.mark.parametrize("uri", ["file:///nowhere", None])
@pytest.mark.parametrize("waited_for", [True, False])
def test_what_may_be_a_scripts_last_step_is_a_snapshot_of_the_round_that_goes_on_from_it(
    tmp_path, monkeypatch, uri, waited_for
):
    """The script has nothing left to commit, and its last commit must be in storage at its end."""
    state = trainingjob.State(folder=str(tmp_path), kept={"seen": 3})
    state.restore()
    state.commit(9, durable=waited_for)
    state._shard.snapshots.finish()
    del state  # its process ends
    agent, found = InMemoryOf(tmp_path), {"seen": 0}
    monkeypatch.setattr(_connection, "agent_channel", lambda: agent)
    monkeypatch.setenv("CONCERTINA_CHECKPOINT", json.dumps({"uri": uri} if uri else None))
    state = trainingjob.State(kept=found)
    assert (state.restore(), found) == (10, {"seen": 3})
    again = dataclasses.replace(agent.held, round=2)
    assert agent.committed == ([again] if uri and waited_for else [])
    for slot in tmp_path.glob("round-2/shard-0/slot-?"):
        with slot.open("rb") as file:
            assert parse_header(file.read(header_length(file.read(8)) - 8)).metadata.waited_for, "so it is once more"


class Watching:
    """State that tries, while it is restored, what another run's retention does."""

    def __init__(self, sweep):
        self.sweep, self.swept = sweep, []

    def state_dict(self):
        return {"swept": len(self.swept)}

    def load_state_dict(self, state):
        self.swept.append(self.sweep())


@pytest.fixture
def older(tmp_path):
    """Create another run's folder with one checkpoint.

    Return its URI, and a function that tries to delete the checkpoint as retention does, and returns whether it did.
    """
    saved(tmp_path / "memory", model=torch.nn.Linear(2, 2), watching=Watching(bool))
    [slot] = [path for path in tmp_path.glob("memory/*/shard-0/slot-?") if read_sidecar(path)]
    id, folder = read_sidecar(slot).id, ObjectPrefix(f"file://{tmp_path}/older", create=True)
    ship(folder, "u1", id, 0, slot)
    publish(folder, Destination(folder.uri), "u1", id, True)
    now = max(entry.at for entry in folder.entries().values())
    return folder.uri, lambda: remove(folder, CheckpointKey("u1", id.round, id.step), now)


@pytest.fixture
def begun_with(tmp_path, monkeypatch):
    """Return a function that creates a State in a job that starts with another run's checkpoint.

    With `own`, the checkpoint is under the job's own URI.
    """

    def begun(uri, own=False, **objects):
        checkpoint = {"uri": uri} if own else {"uri": f"file://{tmp_path}/next", "resumeFrom": uri}
        monkeypatch.setenv("CONCERTINA_CHECKPOINT", json.dumps(checkpoint))
        job = Job(tmp_path / "job")
        monkeypatch.setattr(_connection, "agent_channel", lambda: job)
        return trainingjob.State(**objects)

    return begun


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("peeked", [True, False])
def test_what_a_run_is_begun_with_stays_until_it_has_been_read(older, begun_with, peeked, own):
    uri, sweep = older
    watching = Watching(sweep)
    state = begun_with(uri, own, model=torch.nn.Linear(2, 2), watching=watching)
    if peeked:
        assert state.peek("watching") == {"swept": 0}
    assert state.restore() == 1
    assert watching.swept == [False]
    assert sweep(), "nobody reads it any more"


def test_what_is_newer_in_storage_than_in_memory_stays_until_it_has_been_read(older, begun_with, monkeypatch):
    """Agents say that the newer state is in storage."""
    uri, sweep = older
    latest = read_latest(ObjectPrefix(uri))
    held = Restore(RestoreSource.MEMORY, 0, SnapshotId(latest.round, 0, "", 1))
    monkeypatch.setattr(Job, "start", lambda job: Start(held, 1, latest.uid, durable=latest))
    watching = Watching(sweep)
    assert begun_with(uri, own=True, model=torch.nn.Linear(2, 2), watching=watching).restore() == 1
    assert watching.swept == [False]
    assert sweep(), "nobody reads it any more"


def test_what_can_not_be_gone_on_with_is_kept_no_longer(older, begun_with):
    uri, sweep = older
    state = begun_with(uri, model=torch.nn.Linear(2, 3), watching=Watching(bool))
    with pytest.raises(InvalidInput, match=r"model\.bias was saved as"):
        state.restore()
    assert sweep()
