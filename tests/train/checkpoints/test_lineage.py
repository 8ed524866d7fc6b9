"""Lineage and `concertina reproduce`: a checkpoint says what went into it, and is trained again from the one before."""

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from builders import pages
from builders.train import node, published, states
from concertina.api.parse import parse_spec
from concertina.cli.main import app
from concertina.demo import text
from concertina.kube.manifests.recorded import recorded
from concertina_state.checkpoints import catalogue
from concertina_state.lineage import Origin, TrainedRound
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.build import build

IMAGE = "registry.example/trainer@sha256:" + "ab" * 32


def command(*arguments, code=0):
    """Run a command, and return its output on both streams."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


class Trained:
    """A job whose history is played to its end, with all that the operator would tell its pods."""

    def __init__(self, folder, parent, spec, uid="u1"):
        self.spec = spec
        known = recorded(parse_spec({"spec": spec}))
        self.job = node.Job(folder, parent, spec["trainer"], spec["checkpoint"], uid)
        self.job.environment = {"CONCERTINA_SPEC": known, "CONCERTINA_JOB": "default/job"}
        self.job.images = (IMAGE,)
        self.uri = spec["checkpoint"]["uri"]

    def at(self, step):
        return catalogue.at_step(self.uri, step)


def spec_of(trainer, uri, **more):
    containers = [{"name": "trainer", "image": "registry.example/trainer:1"}]
    template = {"spec": {"containers": containers}}
    checkpoint = {"uri": uri, "everySteps": 3, "keep": 100}
    return {
        "replicas": 3,
        "elastic": {"minReplicas": 2},
        "template": template,
        "trainer": trainer,
        "checkpoint": checkpoint,
        **more,
    }


@pytest.fixture(scope="module")
def bitwise(folder_of_module, parent, trainer, tmp_path_factory):
    """12 steps: 2 workers that are killed in the eighth, and 3 to the end."""
    uri = f"file://{tmp_path_factory.mktemp('run')}/checkpoints"
    trained = Trained(folder_of_module / "job", parent, spec_of({**trainer, "determinism": "Bitwise"}, uri))
    trained.job.run(2, script=node.Script(kill=(8, (1,))))
    last = trained.job.run(3, trained.job.newest())
    assert set(last.codes.values()) == {0}, last.output
    return trained


def written(uri, step, *options):
    return yaml.safe_load(command("reproduce", uri, "--step", step, *options))


def run(folder, parent, manifest, uid="u2"):
    spec = manifest["spec"]
    return node.Job(folder, parent, spec["trainer"], spec["checkpoint"], uid).run(spec["replicas"])


def again(folder, parent, manifest):
    """Train what it says; what LATEST names then."""
    outcome = run(folder, parent, manifest)
    assert set(outcome.codes.values()) == {0}, outcome.output
    return outcome.durable[-1]


def same_bits(one, other):
    one, other = states.of_checkpoint(one), states.of_checkpoint(other)
    return one.keys() == other.keys() and all(
        torch.equal(value.view(torch.int32), other[name].view(torch.int32)) for name, value in one.items()
    )


def test_a_checkpoint_is_trained_again_from_its_parent_to_the_same_bits(bitwise, folder, parent, tmp_path):
    said = command("reproduce", bitwise.uri, "--step", 12, "-o", tmp_path / "again.yaml")
    assert said.startswith("The result is bit-identical if nothing else differs:"), said
    manifest = yaml.safe_load((tmp_path / "again.yaml").read_text())
    before = bitwise.at(12).manifest.lineage.parent
    assert 0 < before.step < 12
    assert manifest["spec"]["checkpoint"]["resumeFrom"] == before.uri == bitwise.at(before.step).uri
    assert manifest["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert (manifest["spec"]["replicas"], "elastic" in manifest["spec"]) == (3, False)
    done = again(folder, parent, manifest)
    assert (done.step, done.complete) == (12, True)
    assert same_bits(done.uri, bitwise.at(12).uri)
    assert not same_bits(done.uri, before.uri)


def test_where_all_before_it_are_gone_it_is_trained_again_from_the_seed(bitwise, folder, parent, tmp_path):
    """It ends in the middle of its run, on the schedule of the whole of it, and in another world than it once was."""
    steps = sorted(manifest.id.step for manifest in catalogue.finished(ObjectPrefix(bitwise.uri))[0])
    first, middle = steps[0], next(step for step in steps if bitwise.at(step).manifest.id.round == 2)
    assert first < middle
    uri = command("checkpoint", "copy", bitwise.at(middle).uri, tmp_path / "alone").split()[0]
    manifest = written(uri, middle)
    assert "resumeFrom" not in manifest["spec"]["checkpoint"]
    done = again(folder, parent, manifest)
    assert (done.step, done.complete) == (middle, True)
    assert same_bits(done.uri, uri)


@pytest.mark.parametrize("beginning", ["concertina checkpoint show", "concertina reproduce"])
def test_the_commands_of_the_page_run(bitwise, tmp_path, monkeypatch, beginning):
    monkeypatch.chdir(tmp_path)
    [words] = pages.commands("lineage.md", beginning, {"URI": bitwise.uri})
    command(*words[1:])
    assert [file.name for file in tmp_path.iterdir()] == (["again.yaml"] if "reproduce" in words else [])


BARE = """
import sys
sys.modules |= dict.fromkeys(("torch", "numpy"))
from concertina.cli.main import app
app(sys.argv[1:])
"""


def bare(*arguments):
    """Return what the command prints in a Python without torch and numpy."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_need_neither_torch_nor_numpy(bitwise, tmp_path):
    copy = tmp_path / "copy"
    for arguments in (
        ("checkpoint", "list", bitwise.uri),
        ("checkpoint", "show", bitwise.uri),
        ("checkpoint", "verify", bitwise.uri),
        ("checkpoint", "copy", bitwise.uri, copy),
        ("checkpoint", "prune", copy, "--keep", 1),
        ("reproduce", bitwise.uri, "--step", 12),
    ):
        assert bare(*arguments) == command(*arguments) != ""
    for how, run_it in (("with", command), ("without", bare)):
        run_it("checkpoint", "export", bitwise.uri, tmp_path / how, "--shard-gigabytes", 0.00005)
    exported = {
        how: {file.name: file.read_bytes() for file in (tmp_path / how).iterdir()} for how in ("with", "without")
    }
    assert len(exported["with"]) > 3
    assert exported["with"] == exported["without"]


def test_what_a_checkpoint_says_of_itself(bitwise):
    manifest = bitwise.at(12).manifest
    lineage = manifest.lineage
    assert [(each.round, each.world) for each in lineage.rounds] == [(1, 2), (2, 3)]
    assert [each.position for each in lineage.rounds] == [7 * each.step for each in lineage.rounds]
    assert lineage.rounds[0].setting == lineage.rounds[1].setting
    assert lineage.spec["template"] == bitwise.spec["template"]
    assert lineage.spec["trainer"]["seed"] == 7
    assert lineage.spec["checkpoint"]["uri"] == bitwise.uri
    assert lineage.images == (IMAGE,)
    assert len(lineage.devices) == 1
    assert lineage.data_sets == (manifest.data,)
    said = command("checkpoint", "show", bitwise.uri, "--step", 12)
    first = 7 * lineage.parent.step
    assert f"positions {first} to 83 in the order of seed 7, digest" in said.replace(chr(10), " ")
    assert "round 2: steps" in said
    assert lineage.parent.uri in said
    assert f"Step          {lineage.parent.step}" in command(
        "checkpoint", "show", bitwise.uri, "--step", lineage.parent.step
    )
    assert "has no checkpoint of step 1. The newest" in command("checkpoint", "show", bitwise.uri, "--step", 1, code=1)


def test_samples_that_were_left_out_are_left_out_again(folder, parent, trainer, tmp_path):
    """As by a rollback: from round 2 on."""
    trained = Trained(folder / "a", parent, spec_of({**trainer, "determinism": "Bitwise"}, f"file://{tmp_path}/run"))
    trained.job.run(2, script=node.Script(drain=(5, True)))
    drained = trained.job.newest()
    ahead = 7 * drained.step + 2
    restore = dataclasses.replace(drained, skipped=((ahead, ahead + 8),))
    assert set(trained.job.run(2, restore).codes.values()) == {0}
    assert trained.at(12).manifest.skipped == restore.skipped
    alone = command("checkpoint", "copy", trained.at(12).uri, tmp_path / "alone").split()[0]
    manifest = written(alone, 12)
    assert "resumeFrom" not in manifest["spec"]["checkpoint"], "a checkpoint before it would say what was left out"
    done = again(folder / "b", parent, manifest)
    assert same_bits(done.uri, trained.at(12).uri)
    assert catalogue.at_step(done.uri, None).manifest.skipped == restore.skipped


def test_a_job_that_went_on_from_another_is_trained_again_from_there(bitwise, folder, parent, tmp_path):
    uri, begun = f"file://{tmp_path}/next", bitwise.at(12).uri
    spec = spec_of({**bitwise.spec["trainer"], "steps": 13}, uri)
    spec["checkpoint"] |= {"resumeFrom": bitwise.uri, "everySteps": 100}
    trained = Trained(folder / "a", parent, spec, "u3")
    assert set(trained.job.run(2).codes.values()) == {0}
    lineage = trained.at(13).manifest.lineage
    assert (lineage.parent.uri, lineage.parent.uid, lineage.begun_from) == (begun, "u1", begun)
    assert [(each.step, each.world) for each in lineage.rounds] == [(12, 2)]
    done = again(folder / "b", parent, written(uri, 13))
    assert same_bits(done.uri, trained.at(13).uri)


def test_other_data_are_refused_before_and_at_the_start(folder, parent, trainer, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(trainer["data"]["uri"], data)
    config = {**trainer, "steps": 2, "data": {"uri": str(data)}}
    trained = Trained(folder / "a", parent, spec_of(config, f"file://{tmp_path}/run"))
    assert set(trained.job.run(1).codes.values()) == {0}
    manifest = written(trained.uri, 2)
    before = trained.at(2).manifest.data
    shutil.rmtree(data)
    (tmp_path / "text").mkdir()
    list(build(text.write(tmp_path / "text", 3, 27_000), str(data)))
    said = command("reproduce", trained.uri, "--step", 2, code=1)
    assert f"{data} has digest " in said
    assert f"was trained on {before}" in said
    outcome = run(folder / "b", parent, manifest)
    assert [fault.reason for fault in outcome.faults.values()] == ["DataChanged"]
    assert f"the checkpoint to reproduce was trained on data with digest {before}" in outcome.faults[0].message


def test_no_value_of_a_variable_is_in_storage_and_they_are_asked_for(folder, parent, trainer, tmp_path):
    spec = spec_of({**trainer, "steps": 2}, f"file://{tmp_path}/run")
    reference = {"secretKeyRef": {"name": "keys", "key": "k"}}
    spec["template"]["spec"]["containers"][0]["env"] = [
        {"name": "TOKEN", "value": "hunter2"}, {"name": "KEY", "valueFrom": reference},
    ]  # fmt: skip
    trained = Trained(folder, parent, spec)
    assert set(trained.job.run(1).codes.values()) == {0}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"secretKeyRef" in content for content in files)
    assert not any(b"hunter2" in content for content in files)
    assert "--env TOKEN=..." in command("reproduce", trained.uri, "--step", 2, code=1)
    manifest = written(trained.uri, 2, "--env", "TOKEN=other", "--name", "b")
    assert manifest["metadata"]["name"] == "b"
    variables = manifest["spec"]["template"]["spec"]["containers"][0]["env"]
    assert variables == [{"name": "TOKEN", "value": "other"}, {"name": "KEY", "valueFrom": reference}]


def test_a_checkpoint_without_lineage_is_shown_and_not_trained_again(bitwise, tmp_path):
    uri = command("checkpoint", "copy", bitwise.at(12).uri, tmp_path).split()[0]
    path = Path(uri.removeprefix("file://"), "manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["lineage"]
    path.write_text(json.dumps(manifest))
    assert re.search(r"^Spec +not known$", command("checkpoint", "show", uri), re.MULTILINE)
    assert "has no lineage" in command("reproduce", uri, "--step", 12, code=1)


def test_the_parent_is_one_that_the_state_was_made_from_whatever_latest_names(tmp_path):
    """Round 2 went on from step 5; step 8 of round 1 was published late."""
    uri = f"file://{tmp_path}/run"

    def parent(round, step, *begun):
        rounds = tuple(TrainedRound(number, first, 7 * first, 2, "") for number, first in enumerate(begun, 1))
        done = published.publish(uri, tmp_path, round, step, origin=Origin(rounds))
        assert done.error == ""
        return catalogue.at_step(done.durable.uri, None).manifest.lineage.parent

    assert parent(1, 5, 0) is None
    late = parent(1, 8, 0)
    assert (late.uri, late.step, late.position) == (f"{uri}/u1/round-1/step-5", 5, 35)
    assert late.digest == hashlib.sha256((tmp_path / "run/u1/round-1/step-5/manifest.json").read_bytes()).hexdigest()
    assert parent(2, 10, 0, 5) == late
    assert parent(2, 11, 0, 5).step == 10
    assert parent(3, 12) is None, "a state of an older version does not say"
