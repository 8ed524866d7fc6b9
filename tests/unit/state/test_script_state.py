"""`trainingjob.State` in one process: all that is kept comes back, and what does not fit is said."""

import pytest
import torch

import trainingjob
from concertina_protocol import FailureReason, SnapshotId
from concertina_protocol.worker_channel import Fault
from concertina_state.catalogue import Catalogue
from concertina_state.errors import BadInput
from concertina_state.format.shardfile import ShardMetadata, parse_header
from concertina_state.saved import find
from trainingjob._torch_objects import kept_of_torch


def saved(folder, **objects):
    state = trainingjob.State(folder=str(folder), **objects)
    state.restore()
    state.commit(0, durable=True)


def restored(folder, **objects):
    assert trainingjob.State(folder=str(folder), **objects).restore() == 1


class Shards:
    """What ranks of a world have saved."""

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
    """Of the script of docs/scripts.md: a few of the ranks of five and more have no row of its one wide weight."""
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    kept = kept_of_torch({"model": model, "optimizer": optimizer})
    arrays = {f"{name}.{key}": array for name, each in kept.items() for key, array in each.arrays().items()}
    own = torch.zeros(9, dtype=torch.uint8)
    catalogues = [Catalogue(arrays, {f"rank-{rank}": own}, rank, world) for rank in range(world)]
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
    """What it is told."""

    def __init__(self):
        self.told = []
        self.send = self.told.append


def trained(*groups):
    """A model and its optimizer, with these parameters' groups: one each, or all in one."""
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
        (trained(), with_scheduler(), "the saved state of step 1 has no scheduler: give the script what it had"),
        (
            trained(),
            trained(["weight"], ["bias"]),
            r"optimizer was saved with groups of \[2\] parameters and has groups of \[1, 1\] now: give the script",
        ),
        (
            trained(["weight", "bias"], []),
            trained(["weight"], ["bias"]),
            r"optimizer was saved with groups of \[2, 0\] parameters and has groups of \[1, 1\] now",
        ),
        (
            {"kept": {"a": torch.zeros(2), "b": 1}},
            {"kept": {"a": 1, "b": 1}},
            "a was saved as an array, and is none now: give the script what it had",
        ),
    ],
)
def test_a_state_of_other_objects_is_refused_and_the_job_is_told(tmp_path, monkeypatch, before, now, sentence):
    saved(tmp_path, **before)
    state, agent = trainingjob.State(folder=str(tmp_path), **now), Agent()
    monkeypatch.setattr(trainingjob, "connection", lambda: agent)
    with pytest.raises(BadInput, match=sentence) as refused:
        state.restore()
    assert agent.told == [Fault(FailureReason.BAD_INPUT, str(refused.value))]
