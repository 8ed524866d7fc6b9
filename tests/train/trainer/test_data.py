"""Data: built the same every time, read from disk and from S3, and refused with a sentence where it is damaged."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest

from builders.train import node
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.read.sequence_reader import Reader

pytestmark = pytest.mark.usefixtures("data_cache")


@pytest.fixture
def files(tmp_path):
    paths = []
    for i in range(9):
        path = tmp_path / f"{i}.txt"
        path.write_bytes(bytes([97 + i]) * (300 + i))
        paths.append(path)
    return paths


def test_the_same_files_give_the_same_bytes(files, tmp_path):
    for out in ("one", "two"):
        *_, last = build(files, str(tmp_path / out), shard_bytes=700)
        assert last.done == last.total == sum(file.stat().st_size for file in files)
    manifest = last.manifest
    assert len(manifest.shards) == 5
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    text = b"".join((tmp_path / "one" / shard.file).read_bytes() for shard in manifest.shards)
    assert text == b"".join(file.read_bytes() + b"\0" for file in files)
    assert np.fromfile(tmp_path / "one" / manifest.shards[1].documents_file, "<u8").tolist() == [0, 303]


def test_a_reader_gives_what_the_order_says(files, tmp_path):
    list(build(files, str(tmp_path / "out"), shard_bytes=700))
    reader = Reader(DataConfig(uri=str(tmp_path / "out")), sequence_length=50, seed=1)
    tokens = reader.read(3, 40)
    for (_, shard, row), sequence in zip(np.transpose(reader.places(np.arange(3, 40))), tokens, strict=True):
        content = (tmp_path / "out" / f"shard-{shard:06}.bin").read_bytes()
        assert bytes(sequence.astype(np.uint8)) == content[row * 50 : row * 50 + 51]


def test_a_damaged_shard_is_refused(files, tmp_path):
    out = tmp_path / "out"
    list(build(files, str(out), shard_bytes=700))
    path = out / "shard-000002.bin"
    content = path.read_bytes()
    path.write_bytes(b"?" + content[1:])
    with pytest.raises(InvalidInput) as refused:
        Reader(DataConfig(uri=str(out)), 50, seed=1).read(0, 100)
    said = str(refused.value)
    assert f"{out}/shard-000002.bin is damaged" in said
    assert hashlib.sha256(content).hexdigest() in said
    assert "build the data again" in said


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda out: shutil.rmtree(out), "does not exist"),
        (lambda out: (out / "manifest.json").unlink(), "has no manifest.json"),
        (lambda out: (out / "manifest.json").write_text("{"), "is not a data manifest"),
        (lambda out: change(out, lambda m: m["shards"].pop()), "the manifest was changed after the build"),
        (lambda out: change(out, lambda m: m.update(format=1)), "has format 1"),
        (lambda out: (out / "shard-000001.bin").unlink(), "is missing, but the manifest names it"),
    ],
)
def test_what_is_wrong_is_said(files, tmp_path, damage, said):
    out = tmp_path / "out"
    list(build(files, str(out), shard_bytes=700))
    damage(out)
    with pytest.raises(InvalidInput, match=said):
        Reader(DataConfig(uri=str(out)), 50, seed=1).read(0, 100)


def change(out, how):
    manifest = json.loads((out / "manifest.json").read_text())
    how(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))


def test_a_worker_says_bad_input_and_exits_78(folder, parent, trainer, data, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    (damaged / "shard-000000.bin").write_bytes(b"?" * (damaged / "shard-000000.bin").stat().st_size)
    outcome = node.Job(folder, parent, {**trainer, "data": {"uri": str(damaged)}}).run(1)
    assert outcome.codes == {0: 78}
    assert outcome.faults[0].reason == "Damaged"
    assert "shard-000000.bin is damaged" in outcome.faults[0].message
    assert "shard-000000.bin is damaged" in outcome.output


def test_other_data_than_the_snapshot_s_is_refused(folder, parent, trainer, files, tmp_path):
    job = node.Job(folder, parent, {**trainer, "steps": 3})
    assert job.run(1).codes == {0: 0}
    list(build(files, str(tmp_path / "other")))
    job.trainer = {**job.trainer, "data": {"uri": str(tmp_path / "other")}}
    outcome = job.run(1, job.newest())
    assert outcome.codes == {0: 78}
    assert outcome.faults[0].reason == "DataChanged"
    assert "training can only continue with the same data" in outcome.faults[0].message


def test_another_model_than_the_snapshot_s_is_refused(folder, parent, trainer):
    job = node.Job(folder, parent, {**trainer, "steps": 3})
    assert job.run(1).codes == {0: 0}
    job.trainer = {**job.trainer, "model": {**trainer["model"], "dim": 64}}
    outcome = job.run(1, job.newest())
    assert outcome.codes == {0: 78}
    assert "model.dim was 32 and is now 64" in outcome.faults[0].message


def test_a_mistake_in_the_configuration_is_bad_input(folder, parent, trainer):
    outcome = node.Job(folder, parent, {**trainer, "stepz": 3}).run(1)
    assert outcome.codes == {0: 78}
    assert "stepz" in outcome.faults[0].message


def test_a_loss_that_is_not_finite_ends_the_round_and_is_not_kept(folder, parent, trainer):
    wild = {"learningRate": 10.0, "warmupSteps": 0, "weightDecay": 10.0, "maxGradNorm": 0.0}
    job = node.Job(folder, parent, {**trainer, "optimizer": wild, "steps": 400})
    outcome = job.run(1)
    assert outcome.codes == {0: 1}
    assert outcome.faults[0].reason == "LossNotFinite"
    [bad] = re.findall(r"step (\d+) \(.*\): the loss is .*; the results of that step are discarded", outcome.output)
    assert int(bad) == outcome.progress[-1].step + 1
    assert job.newest().step < int(bad)  # by one, unless the peer was late with the copy that comes before


def test_the_command_builds_and_shows(files, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert cli.main(["data", "build", "--out", out, "--pattern", "*.txt", "--processes", "1", str(tmp_path)]) == 0
    assert "2,745 tokens of 256 values (bytes) in 9 documents and 1 shards" in capsys.readouterr().out
    assert cli.main(["data", "show", out]) == 0
    assert "shard-000000.bin  2,745 tokens  9 documents" in capsys.readouterr().out
    assert cli.main(["data", "show", str(tmp_path)]) == 78
    assert "has no manifest.json" in capsys.readouterr().err
