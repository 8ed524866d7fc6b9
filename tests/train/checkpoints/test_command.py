"""`concertina checkpoint`: on checkpoints of real runs, in files and in S3, without a cluster."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer
from typer.testing import CliRunner

from builders.train import node
from concertina.cli.checkpoint import app
from concertina_state.checkpoints import catalogue
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader


def command(*arguments: str, code: int = 0) -> str:
    """Run a command, and return its output on both streams."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def job(folder_of_module, parent, trainer, s3, tmp_path_factory):
    """Run a job of three workers that saves to S3, with checkpoints of about the steps 4, 8 and 12."""
    uri = f"s3://train/{tmp_path_factory.mktemp('run').name}"
    job = node.Job(folder_of_module / "job", parent, trainer, {"uri": uri, "everySteps": 3, "keep": 100})
    assert job.run(3).errors == []
    return job


@pytest.fixture
def uri(job):
    return job.checkpoint["uri"]


def test_list_and_show(uri, job):
    latest = read_latest(ObjectPrefix(uri))
    lines = command("list", uri).splitlines()
    assert len([line for line in lines if "u1/round-1/step-" in line]) == len(lines) - 1 >= 2
    assert [line.split()[0] for line in lines if "LATEST, complete" in line] == ["12"]
    said = command("show", uri)
    assert "12, the last of its run" in said
    assert "84 samples consumed" in said
    manifest = json.loads(command("show", latest.uri, "-o", "json"))
    assert (manifest["version"], manifest["id"]["step"], len(manifest["parts"])) == (1, 12, 3)
    assert "neither a checkpoint (there is no manifest.json) nor the folder of a run" in command(
        "show", f"{uri}/u1", code=1
    )


def test_all_ranks_say_the_same_of_the_state(uri):
    """Position, data, config, what was skipped: byte for byte, but for the shard's own number."""
    facts = [dataclasses.replace(part.header.metadata, shard=0) for part in catalogue.at_step(uri, None).shards]
    assert len(facts) == 3
    assert len({json.dumps(dataclasses.asdict(each)) for each in facts}) == 1


def test_verify_names_the_file_that_is_bad(uri, tmp_path):
    assert "is undamaged: 3 parts" in command("verify", uri)
    copied = command("copy", uri, str(tmp_path)).split()[0]
    part = Path(copied.removeprefix("file://"), "shard-1-of-3.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    said = command("verify", str(tmp_path), code=1)
    assert said.count("\n") == 1
    assert "shard-1-of-3.safetensors is damaged" in said
    part.unlink()
    assert "shard-1-of-3.safetensors" in command("verify", str(tmp_path), code=1)


def test_list_shows_what_is_whole_and_says_what_is_not(uri, tmp_path):
    """Other commands' advice is to choose another checkpoint from it."""
    last = Path(command("copy", uri, str(tmp_path)).split()[0].removeprefix("file://"))
    steps = sorted(m.id.step for m in _finished(uri))
    for step in steps[:-1]:
        command("copy", f"{uri}/u1/round-1/step-{step}", str(tmp_path))
    (last.with_name(f"step-{steps[0]}") / "manifest.json").write_text("{")
    said = command("list", str(tmp_path))
    assert f"step-{steps[0]} " not in said
    assert f"step-{steps[0]}/manifest.json is damaged" in said
    assert "LATEST, complete" in said
    shutil.rmtree(last)
    assert "LATEST names u1/round-1/step-12, which is missing or can't be used" in command("list", str(tmp_path))
    assert "was deleted because newer checkpoints exist" in command("verify", str(tmp_path), code=1)
    (tmp_path / "LATEST").write_text("?")
    assert "LATEST is damaged" in command("list", str(tmp_path))
    assert "both source and destination" in command("copy", uri, uri, code=1)


def test_a_copy_is_gone_on_from(uri, job, folder, parent, trainer, tmp_path):
    """From S3 to files: LATEST is made, and a run takes it up."""
    assert "is a verified copy of" in command("copy", uri, f"{tmp_path}/copy")
    latest = read_latest(ObjectPrefix(f"file://{tmp_path}/copy"))
    assert (latest.step, latest.complete) == (12, True)
    options = {"uri": f"file://{tmp_path}/next", "resumeFrom": f"file://{tmp_path}/copy"}
    assert list(node.Job(folder, parent, {**trainer, "steps": 13}, options).run(1).losses) == [13]
    assert "is a verified copy of" in command("copy", f"file://{tmp_path}/copy", f"{uri}-back")
    assert StoredCheckpoint(read_latest(ObjectPrefix(f"{uri}-back")).uri).manifest.id.step == 12


def test_an_export_is_the_same_model_in_transformers(uri, folder, parent, trainer, tmp_path):
    """Its loss on the next samples is the one with which the run goes on; in several files."""
    said = command("export", uri, f"{tmp_path}/hf", "--shard-gigabytes", "0.00005")
    assert "model-00001-of-0000" in said
    assert "already contains weights" in command("export", uri, f"{tmp_path}/hf", code=1), (
        "which would be mixed with the exported ones"
    )
    # Here, because each process of the suite imports this module, and that takes two seconds.
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    config = TrainerConfig.model_validate(trainer)
    tokens = torch.from_numpy(Reader(config.data, config.model.sequence_length, config.seed).read(84, 91))
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    options = {"uri": f"file://{tmp_path}/next", "resumeFrom": uri}
    outcome = node.Job(folder, parent, {**trainer, "steps": 13}, options).run(1)
    assert outcome.losses[13] == pytest.approx(loss, rel=1e-5)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "naïve\n\tcafé 日本"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_prune_shows_first_and_deletes_when_told(uri, tmp_path):
    command("copy", uri, str(tmp_path))
    steps = sorted(m.id.step for m in _finished(uri))
    assert "Add --yes" in command("prune", uri, "--keep", "1")
    assert sorted(m.id.step for m in _finished(uri)) == steps
    command("prune", uri, "--keep", "1", "--keep-every-steps", "6", "--yes")
    left = sorted(m.id.step for m in _finished(uri))
    assert left[-1] == 12
    assert set(left) == {12, *[step for step in steps if step >= 6][:1]}
    assert "nothing to delete" in command("prune", str(tmp_path), "--keep", "3")


def _finished(uri):
    return catalogue.finished(ObjectPrefix(uri))[0]
