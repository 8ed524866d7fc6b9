"""Plain torch.distributed.checkpoint reads checkpoints of the bundled trainer, from where they are."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import trainingjob.dcp
from builders.programs import PROGRAMS, SEARCH_PATH
from builders.train import node, states
from builders.train.published import flip_a_byte
from concertina.cli.checkpoint import app
from concertina_state.checkpoints.catalogue import copy
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects import retry
from concertina_state.objects.prefix import ObjectPrefix

STEPS = 3


@pytest.fixture(scope="module")
def durable(folder_of_module, parent, trainer, s3, tmp_path_factory):
    """Train three workers, and return their checkpoint in S3."""
    uri = f"s3://train/{tmp_path_factory.mktemp('dcp').name}"
    job = node.Job(folder_of_module / "job", parent, {**trainer, "steps": STEPS}, {"uri": uri})
    outcome = job.run(3)
    assert outcome.errors == [], outcome.output
    return outcome.durable[-1]


def dcp_name(name):
    """Return the flat key of a tensor of ours, as docs/dcp.md says."""
    return re.sub(r"^optimizer\.(exp_avg|exp_avg_sq)\.(.*)$", r"optimizer.state.\2.\1", name)


@pytest.fixture
def local(durable, tmp_path):
    """Copy the checkpoint to a folder, and return its URI."""
    return copy(StoredCheckpoint(durable.uri), ObjectPrefix(f"file://{tmp_path}/local", create=True), lambda size: None)


def test_ranks_that_divide_tensors_otherwise_read_their_parts_from_s3(durable, tmp_path):
    world = 2
    command = [sys.executable, str(PROGRAMS / "dcp_load.py"), durable.uri]
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(r), str(world), f"{tmp_path}/store", f"{tmp_path}/{r}"], env=environment)
        for r in range(world)
    ]
    assert [rank.wait() for rank in ranks] == [0] * world
    expected = {dcp_name(name): value for name, value in states.of_checkpoint(durable.uri).items()}
    for rank in range(world):
        whole = torch.load(tmp_path / str(rank))
        assert {name for name in whole if not name.endswith(".step")} == expected.keys()
        for name, value in expected.items():
            assert torch.equal(whole[name], value), name
        assert {value.item() for name, value in whole.items() if name.endswith(".step")} == {STEPS}


def test_damage_is_found_before_it_is_used(local, monkeypatch):
    monkeypatch.setattr(retry, "GRACE", (0.01,))
    flip_a_byte(local, 1)
    reader = trainingjob.dcp.Reader(local)
    saved = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in saved.items()}
    with pytest.raises(CheckpointException, match=r"shard-1-of-3\.safetensors is damaged: its bytes"):
        dcp.load(found, storage_reader=reader)


def test_a_part_that_no_shard_has_is_named(local):
    """Fail, where torch's own reader would leave the tensor as it was."""

    class Holed(trainingjob.dcp.Reader):
        def read_metadata(self):
            metadata = super().read_metadata()
            for header in self._contents.headers.values():
                header.chunks.pop("model.norm.weight", None)
            return metadata

    with pytest.raises(CheckpointException, match=r"model\.norm\.weight is not wholly in .*local"):
        dcp.load({"model.norm.weight": torch.zeros(32)}, storage_reader=Holed(local))


def test_a_converted_checkpoint_is_read_by_torch_alone(durable, tmp_path):
    """Convert by the command from S3, and read by dcp.load and dcp_to_torch_save."""
    said = CliRunner().invoke(app, ["export", durable.uri, f"{tmp_path}/out", "--to", "dcp"])
    assert said.exit_code == 0, said.output
    again = CliRunner().invoke(app, ["export", durable.uri, f"{tmp_path}/out", "--to", "dcp"])
    assert "out is not empty: name a new folder" in again.output
    expected = {dcp_name(name): value for name, value in states.of_checkpoint(durable.uri).items()}
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert whole.keys() == {"model", "optimizer"}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        section, _, rest = name.partition(".")
        assert torch.equal(whole[section][rest], value), name
    assert whole["optimizer"]["state.norm.weight.step"] == STEPS
