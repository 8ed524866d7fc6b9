"""Lineage and `concertina reproduce`: a checkpoint says what went into it, and is trained again from the one before."""

import pytest
import torch
import yaml
from typer.testing import CliRunner

from builders.train import node, states
from concertina.api.parse import parse_spec
from concertina.cli.main import app
from concertina.kube.manifests.recorded import recorded
from concertina_state.checkpoints import catalogue

IMAGE = "registry.example/trainer@sha256:" + "ab" * 32
OTHER = "registry.example/trainer@sha256:" + "cd" * 32


def command(*arguments, code=0):
    """What it says, on both streams."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


class Trained:
    """A job whose history is played to its end, with all that the operator would tell its pods."""

    def __init__(self, folder, parent, spec, uid="u1"):
        self.spec = spec
        text = recorded(parse_spec({"spec": spec}))
        self.job = node.Job(folder, parent, spec["trainer"], spec["checkpoint"], uid)
        self.job.environment = {"CONCERTINA_SPEC": text, "CONCERTINA_JOB": "default/job"}
        self.job.images = (IMAGE,)
        self.uri = spec["checkpoint"]["uri"]

    def at(self, step):
        return catalogue.at_step(self.uri, step)


def spec_of(trainer, uri, **more):
    containers = [{"name": "trainer", "image": "registry.example/trainer:1"}]
    template = {"spec": {"containers": containers}}
    checkpoint = {"uri": uri, "everySteps": 3, "keep": 100}
    return {"replicas": 3, "template": template, "trainer": trainer, "checkpoint": checkpoint, **more}


@pytest.fixture(scope="module")
def bitwise(folder_of_module, parent, trainer, tmp_path_factory):
    """12 steps: 2 workers that are killed in the eighth, and 3 to the end."""
    uri = f"file://{tmp_path_factory.mktemp('run')}/checkpoints"
    trained = Trained(folder_of_module / "job", parent, spec_of({**trainer, "determinism": "bitwise"}, uri))
    trained.job.run(2, script=node.Script(kill=(8, (1,))))
    last = trained.job.run(3, trained.job.newest())
    assert set(last.codes.values()) == {0}, last.output
    return trained


def again(folder, parent, file, world=None):
    """Train what a manifest says; the URI of the one checkpoint that it ends with."""
    written = yaml.safe_load(file.read_text())
    spec = written["spec"]
    job = node.Job(folder, parent, spec["trainer"], spec["checkpoint"], "u2")
    outcome = job.run(world or spec["replicas"])
    assert set(outcome.codes.values()) == {0}, outcome.output
    return outcome.durable[-1]


def same_bits(one, other):
    one, other = states.of_checkpoint(one), states.of_checkpoint(other)
    return one.keys() == other.keys() and all(
        torch.equal(value.view(torch.int32), other[name].view(torch.int32)) for name, value in one.items()
    )


def test_a_checkpoint_is_trained_again_from_its_parent_to_the_same_bits(bitwise, folder, parent, tmp_path):
    said = command("reproduce", bitwise.uri, "--step", 12, "-o", tmp_path / "again.yaml")
    assert said.startswith("To the bit, if nothing else differs:"), said
    written = yaml.safe_load((tmp_path / "again.yaml").read_text())
    before = bitwise.at(12).manifest.lineage.parent
    assert 0 < before.step < 12
    assert written["spec"]["checkpoint"]["resumeFrom"] == before.uri == bitwise.at(before.step).uri
    assert written["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert written["spec"]["replicas"] == 3
    done = again(folder, parent, tmp_path / "again.yaml")
    assert (done.step, done.complete) == (12, True)
    assert same_bits(done.uri, bitwise.at(12).uri)
    assert not same_bits(done.uri, before.uri)
