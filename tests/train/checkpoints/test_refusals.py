"""`concertina checkpoint` where a store can't be used: each command says what to do, and ends with exit status 1."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from builders.train import small, states
from concertina.cli.checkpoint import app

COMMANDS = {
    "list": ["list", "URI"],
    "show": ["show", "URI"],
    "verify": ["verify", "URI"],
    "export": ["export", "URI", "FOLDER"],
    "copy": ["copy", "URI", "FOLDER"],
    "prune": ["prune", "URI", "--keep", "1", "--yes"],
}
GOOD = "s3://train/nothing-there"
WRONG = {
    "bucket": ({}, "s3://nowhere/x", "The bucket nowhere does not exist at http://127.0.0.1"),
    "no bucket": ({}, "s3:///x", "it names no bucket"),
    "secret": (
        {"AWS_SECRET_ACCESS_KEY": "wrong"},
        GOOD,
        "SignatureDoesNotMatch): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to credentials that can read",
    ),
    "half a key": ({"AWS_SECRET_ACCESS_KEY": None}, GOOD, "can't be used: Missing SecretAccessKey. Correct AWS_ACCESS"),
    "endpoint": (
        {"AWS_ENDPOINT_URL": "my host:80"},
        GOOD,
        "AWS_ENDPOINT_URL is 'my host:80', which is not an http:// or",
    ),
    "CA": ({"AWS_CA_BUNDLE": "/no/ca.pem"}, GOOD, "No such file or directory: '/no/ca.pem'"),
    "scheme": ({}, "http://train/x", "its scheme must be s3://"),
    "key of Azure": ({"AZURE_STORAGE_ACCOUNT_KEY": "!"}, "az://c/x", "Correct AZURE_STORAGE_ACCOUNT_NAME and"),
    "key of Google": ({"GOOGLE_SERVICE_ACCOUNT_KEY": "{no"}, "gs://b/x", "Correct GOOGLE_SERVICE_ACCOUNT_KEY (JSON)"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(("change", "uri", "sentence"), WRONG.values(), ids=WRONG)
def test_a_refusal_is_a_sentence(s3, monkeypatch, tmp_path, command, change, uri, sentence):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    given = {"URI": uri, "FOLDER": str(tmp_path)}
    result = CliRunner().invoke(app, [given.get(word, word) for word in command])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exception
    assert sentence in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("command", ["copy", "export"])
def test_a_target_that_refuses(s3, command, trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(trainer))
    uri = small.publish(f"s3://train/{tmp_path.name}", tmp_path).uri
    result = CliRunner().invoke(app, [command, uri, "s3://nowhere/x"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "The bucket nowhere does not exist at http://127.0.0.1" in result.output


def test_a_model_of_one_s_own_can_not_be_exported(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps({**trainer, "model": {"entrypoint": "audio_model:spec"}}))
    uri = small.publish(f"file://{tmp_path}/run", tmp_path).uri
    result = CliRunner().invoke(app, ["export", uri, f"{tmp_path}/hf"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "is a checkpoint of audio_model:spec: only the bundled decoder can be exported" in result.output
    result = CliRunner().invoke(app, ["export", uri, f"{tmp_path}/own", "--to", "safetensors"])
    assert result.exit_code == 0, result.output
    stored = states.of_checkpoint(uri)
    exported = load_file(tmp_path / "own/model.safetensors")
    assert {f"model.{name}" for name in exported} == {name for name in stored if name.startswith("model.")}
    assert exported
    for name, value in exported.items():
        assert torch.equal(value, stored[f"model.{name}"]), name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--to", "dcp", "--ema"], "--ema does not apply to --to dcp: remove it."),
        (["--to", "peft", "--data", "x", "--shard-gigabytes", "1"], "--shard-gigabytes, --data does not apply to"),
        (["--to", "peft"], "has no adapters: export it as a Hugging Face model (--to hf)."),
        (["--to", "safetensors", "--ema"], "has no average of the weights"),
    ],
)
def test_an_export_that_can_not_be_made_says_why(trainer, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(trainer))
    uri = small.publish(f"file://{tmp_path}/run", tmp_path).uri
    result = CliRunner().invoke(app, ["export", uri, f"{tmp_path}/out", *arguments])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert sentence in " ".join(result.output.split())


def test_a_manifest_of_another_trainer_can_not_be_exported(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(trainer))
    uri = small.publish(f"file://{tmp_path}/run", tmp_path).uri
    manifest = Path(uri.removeprefix("file://"), "manifest.json")
    manifest.write_text(manifest.read_text().replace('"globalBatchSize"', '"eels"'))
    result = CliRunner().invoke(app, ["export", uri, f"{tmp_path}/hf"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "with a trainer configuration that this version does not support" in result.output
