"""Test gs:// beyond the tests of all stores (`storage_uri`).

The tests cover faults that Google's testbench injects, the texts of refusals, and every command. They need a checkout
of that testbench.
"""

import base64
import contextlib
import json
import random

import pytest
from typer.testing import CliRunner

from builders.stores import gcs_testbench
from builders.train.published import publish
from concertina.cli.checkpoint import app
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import PIECE, Changed, ObjectPrefix, StorageError
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.read.sequence_reader import Reader

CONTENT = random.Random(1).randbytes(PIECE + 12345)


@contextlib.contextmanager
def spoilt(url, method, *faults):
    """Inject these faults into the next requests of this method, and check that each one occurred."""
    test = gcs_testbench.spoil(url, {f"storage.objects.{method}": [*faults]})
    try:
        yield
        assert gcs_testbench.spoilt(test), "a fault was not met"
    finally:
        gcs_testbench.forget(test)


@pytest.fixture
def folder(google, tmp_path):
    return ObjectPrefix(f"gs://train/{tmp_path.name}")


@pytest.mark.parametrize("fault", ["return-503", "return-429", "return-reset-connection", "return-broken-stream"])
def test_an_answer_that_fails_is_asked_for_again(google, folder, fault):
    folder.put("key", CONTENT)
    with spoilt(google, "get", fault):
        assert folder.get("key") == CONTENT
    with spoilt(google, "get", fault, fault):
        found = bytearray(len(CONTENT) - 1)
        folder.read_into("key", 1, [memoryview(found)])
        assert found == CONTENT[1:]
    with spoilt(google, "list", fault):
        assert folder.list("") == {"key": len(CONTENT)}


@pytest.mark.parametrize("fault", ["return-503", "return-429", "return-reset-connection"])
def test_a_write_that_fails_is_sent_again(google, folder, fault):
    for write in (lambda: folder.put("key", CONTENT), lambda: folder.put("small", b"small")):
        with spoilt(google, "insert", fault, fault):
            write()
    with spoilt(google, "delete", fault):
        folder.delete(["small", "not there"])
    assert folder.get("key") == CONTENT
    assert folder.list("") == {"key": len(CONTENT)}


def test_a_conditional_write_is_tried_again_where_it_was_not_done(google, folder):
    with spoilt(google, "insert", "return-503"):
        folder.put_if("LATEST", b"first", None)
    with spoilt(google, "insert", "return-503"), pytest.raises(Changed):
        folder.put_if("LATEST", b"second", None)
    assert folder.get("LATEST") == b"first"


def test_a_listing_of_many_pages(folder):
    keys = {f"a/{i:02}?#%&'\"<é>": 1 for i in range(33)}
    for key in keys:
        folder.put(key, b"x")
    folder.put("ab", b"")
    assert folder.list("a") == keys
    assert len(folder.list("")) == 34


@pytest.mark.parametrize(
    ("uri", "faults", "sentence"),
    [
        ("gs://nowhere/x", [], "The bucket nowhere does not exist at http://127.0.0.1"),
        ("gs://train/x", ["return-401"], "refused the credentials for gs://train/x (read LATEST; AuthenticationReq"),
        ("gs://train/x", ["return-403"], "AccessDenied): set GOOGLE_SERVICE_ACCOUNT_KEY (JSON) or GOOGLE_APPLICATION"),
        ("gs://train/x", [], "gs://train/x has no LATEST"),
    ],
)
def test_a_refusal_is_a_sentence(google, uri, faults, sentence):
    with spoilt(google, "get", *faults) if faults else contextlib.nullcontext():
        result = CliRunner().invoke(app, ["prune", uri, "--keep", "1"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert sentence in result.output


def test_every_command_on_checkpoints(google, tmp_path, trainer, monkeypatch):
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(trainer))
    uri, copy = f"gs://train/{tmp_path.name}", f"gs://train/{tmp_path.name}-copy"
    for step in (1, 2, 3):
        published = publish(uri, tmp_path, 1, step).durable.uri
    runs = {
        ("list", uri): "LATEST",
        ("show", uri): "round-1/step-3",
        ("verify", uri): "is undamaged",
        ("copy", uri, copy): "is a verified copy of",
        ("verify", copy): "is undamaged",
        ("prune", uri, "--keep", "1", "--yes"): "step-2",
    }
    for arguments, said in runs.items():
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == 0, result.output
        assert said in result.output, arguments
    assert StoredCheckpoint(published).manifest.id.step == 3


def test_data_are_built_read_and_verified(google, tmp_path, data_cache):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"Document {i}: {'words ' * i}"}) + "\n" for i in range(200)))
    uri, local = f"gs://train/{tmp_path.name}", str(tmp_path / "local")
    for out in (uri, local):
        build = ["data", "build", "--processes", "2", "--shard-mebibytes", "0.02", "--validation", "0.1"]
        assert cli.main([*build, "--out", out, str(source)]) == 0
    assert cli.main(["data", "show", uri]) == cli.main(["data", "verify", uri]) == 0
    expected = Reader(DataConfig(uri=local), 50, seed=1).read(0, 300)
    with spoilt(google, "get", "return-503", "return-broken-stream", "return-reset-connection"):
        assert (Reader(DataConfig(uri=uri), 50, seed=1).read(0, 300) == expected).all()
    ObjectPrefix(uri).delete(["shard-000001.bin"])
    assert cli.main(["data", "verify", uri]) == 1


def test_a_key_that_can_not_be_used(google, monkeypatch):
    """As with Google itself: no emulator, a key whose private part is none."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    key = {"type": "service_account", "client_email": "a@b", "private_key": base64.b64encode(b"no").decode()}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**key, "private_key_id": "1"}))
    with pytest.raises(StorageError, match="Correct GOOGLE_SERVICE_ACCOUNT_KEY"):
        ObjectPrefix("gs://train/x")
