"""Durable checkpoints in real storage: shipped, published, fenced, read back into any world, damaged."""

import itertools
import json
import os
import platform
import random
import shutil
import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeStore
from typer.testing import CliRunner

from builders.train import node
from builders.train.published import publish, shard_file
from concertina.cli.checkpoint import app
from concertina_protocol import Durable, Restore, SnapshotId
from concertina_protocol.worker_channel import Probe, Publish, Ship
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import CheckpointKey
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.checkpoints.retention import found, lease, remove
from concertina_state.format.shardfile import Continued, header_length
from concertina_state.objects.prefix import HELD, PIECE, Changed, Missing, ObjectPrefix, StorageError, StoreRefused
from concertina_state.uploader import Destination, answer
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.state.restore import restore

TRAINER = TrainerConfig.model_validate({
    "steps": 1, "data": {"uri": "/none"}, "globalBatchSize": 1, "microBatchSize": 1,
    "model": {"layers": 1, "dim": 8, "heads": 1, "vocabSize": 16},
})  # fmt: skip
OTHER_STORE = pytest.mark.long(
    law="tests/train/checkpoints/test_publishing.py::test_a_run_is_resumed_from_storage_by_another_world[s3]"
)


@pytest.mark.parametrize(
    "storage_uri", ["s3", *(pytest.param(kind, marks=OTHER_STORE) for kind in ("file", "az", "gs"))], indirect=True
)
def test_a_run_is_resumed_from_storage_by_another_world(folder, parent, trainer, storage_uri):
    trainer = {**trainer, "steps": 24}  # the kill at 9 comes late on a busy machine, and not after the end
    reference = node.Job(folder / "whole", parent, trainer).run(3).losses
    job = node.Job(folder / "job", parent, trainer, {"uri": storage_uri, "everySteps": 4, "keep": 2})
    first = job.run(3, script=node.Script(kill=(9, (0, 1, 2))))
    assert first.errors == []
    steps = [d.step for d in first.durable]
    assert steps[0] == 4, "and then from 8 on, when the parts of 4 have been shipped"
    for lost in range(3):
        job.lose(lost)
    latest = read_latest(ObjectPrefix(storage_uri))
    assert latest == first.durable[-1]

    second = job.run(2, Restore("Storage", latest.step, durable=latest))
    assert set(second.codes.values()) == {0}, second.output
    assert second.progress[-1].restored_step == steps[-1]
    assert {**first.losses, **second.losses} == pytest.approx(reference, rel=2e-4)
    assert [d.step for d in second.durable if d.step <= latest.step or d.complete] == [24]


def test_a_checkpoint_that_a_failure_kept_from_storage_is_due_at_once(folder, parent, trainer, tmp_path):
    """Killed after step 9 and before what step 8 began was published: LATEST has 4, and 12 is far away."""
    job = node.Job(folder, parent, {**trainer, "steps": 20}, {"uri": f"file://{tmp_path}/c", "everySteps": 8})
    job.run(2, script=node.Script(kill=(9, (0, 1))))
    job.durable = Durable("u1", 1, 4, "file:///x")
    resumed = job.run(2, job.newest())
    assert set(resumed.codes.values()) == {0}, resumed.output
    assert resumed.durable[0].step == resumed.progress[-1].restored_step + 1
    job.durable = resumed.durable[0]
    restore = job.newest()
    assert restore.step == 20
    job.trainer = {**trainer, "steps": 24}
    steps = [d.step for d in job.run(2, restore).durable]
    assert steps[0] == 21, "16 has been missed"


def test_a_part_that_is_given_up_while_it_is_shipped_leaves_nothing(tmp_path, monkeypatch):
    """Its file is emptied (decision "Freed shards are truncated")."""
    put_pieces, id = ObjectPrefix.put_pieces, SnapshotId(1, 5, "layout", 2)
    path, storage = shard_file(tmp_path, id, 0), tmp_path / "storage"

    def given_up(self, *of_the_part):
        os.truncate(path, 0)
        put_pieces(self, *of_the_part)

    monkeypatch.setattr(ObjectPrefix, "put_pieces", given_up)
    assert "was discarded" in answer(Ship(id, 0, str(path)), Destination(uri=storage.as_uri()), "u1").error
    assert [found for found in storage.rglob("*") if found.is_file()] == []


def test_checkpoints_by_the_clock(folder, parent, trainer, tmp_path):
    """everySeconds: rank 0's clock, the same step on every rank (a part alone would never be published)."""
    job = node.Job(folder, parent, {**trainer, "steps": 100_000}, {"uri": f"file://{tmp_path}/c", "everySeconds": 1})
    outcome = job.run(2, script=node.Script(drain_when=lambda outcome: len(outcome.durable) >= 2))
    assert outcome.errors == []
    assert set(outcome.codes.values()) == {0}, outcome.output


def test_a_drain_is_durable_when_asked(folder, parent, trainer, tmp_path):
    job = node.Job(folder, parent, trainer, {"uri": f"file://{tmp_path}/c"})
    outcome = job.run(2, script=node.Script(drain=(3, True)))
    step = outcome.done[0].step
    assert [(d.step, d.complete) for d in outcome.durable] == [(step, False)]
    assert outcome.done == {0: outcome.done[0], 1: outcome.done[0]}


def test_a_damaged_part_is_refused_with_a_sentence(folder, parent, trainer, tmp_path):
    job = node.Job(folder, parent, trainer, {"uri": f"file://{tmp_path}/c"})
    [durable] = job.run(2).durable
    part = Path(durable.uri.removeprefix("file://"), "shard-1-of-2.safetensors")
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    outcome = job.run(2, Restore("Storage", 12, durable=durable))
    assert outcome.faults[1].reason == "Damaged"
    assert "shard-1-of-2.safetensors is damaged: its bytes 0 to" in outcome.faults[1].message


# --- the fence, without workers ---------------------------------------------------------------------------------------


def test_latest_moves_forward_only(storage_uri, tmp_path):
    assert publish(storage_uri, tmp_path, 2, 10).durable.step == 10
    assert publish(storage_uri, tmp_path, 2, 10).durable.step == 10, "the same again is no error"
    assert publish(storage_uri, tmp_path, 3, 8).durable.step == 8, "a higher round may be at a lower step"
    late = publish(storage_uri, tmp_path, 2, 12)
    assert late.refused
    assert "LATEST is already at round 3, step 8" in late.error
    state = answer(Probe(), Destination(uri=storage_uri), "u1").storage
    assert (state.state, state.latest.round, state.latest.step) == ("Ready", 3, 8)


def test_a_late_publication_whose_parts_have_been_collected_is_refused_not_tried_for_ever(storage_uri, tmp_path):
    id, config = SnapshotId(1, 4, "layout", 2), Destination(uri=storage_uri)
    for shard in range(2):
        assert answer(Ship(id, shard, str(shard_file(tmp_path, id, shard))), config, "u1").error == ""
    publish(storage_uri, tmp_path, 2, 3)
    assert not [key for key in ObjectPrefix(storage_uri).list("u1") if "step-4" in key]
    late = answer(Publish(id), config, "u1")
    assert (late.refused, "LATEST is already at round 2" in late.error) == (True, True)


def test_the_newest_are_kept_and_unfinished_ones_swept(storage_uri, tmp_path):
    for step in (1, 2, 3):
        publish(storage_uri, tmp_path, 1, step)
    unfinished = SnapshotId(1, 4, "layout", 2)
    answer(Ship(unfinished, 0, str(shard_file(tmp_path, unfinished, 0))), Destination(uri=storage_uri), "u1")

    def steps() -> set[str]:
        return {key.split("/")[2] for key in ObjectPrefix(storage_uri).list("u1")}

    assert steps() == {"step-2", "step-3", "step-4"}, "4 may still be finished: LATEST has not passed it"
    publish(storage_uri, tmp_path, 1, 5)
    assert steps() == {"step-3", "step-5"}
    publish(storage_uri, tmp_path, 2, 5)
    assert steps() == {"step-5"}, "of both rounds"


def test_where_deleting_is_refused_checkpoints_are_durable_all_the_same(storage_uri, tmp_path, monkeypatch):
    def refused(self, keys):
        raise StoreRefused("may not delete")

    monkeypatch.setattr(ObjectPrefix, "delete", refused)
    for step in (1, 2):
        assert publish(storage_uri, tmp_path, 1, step).error == ""
    for step in (3, 4):
        done = publish(storage_uri, tmp_path, 1, step)
        assert (done.durable.step, done.error, done.refused) == (step, "may not delete", False)
    assert read_latest(ObjectPrefix(storage_uri)) == done.durable
    assert [place.step for place in sorted(found(ObjectPrefix(storage_uri).entries())[1], key=str)] == [1, 2, 3, 4]


def test_a_run_s_folder_that_was_moved_is_read_where_it_lies_now(tmp_path):
    before, now = tmp_path / "before", tmp_path / "now"
    publish(before.as_uri(), tmp_path, 1, 10)
    shutil.move(before, now)
    latest = answer(Probe(), Destination(uri=now.as_uri()), "new").storage.latest
    assert latest.uri == f"{now.as_uri()}/u1/round-1/step-10"
    assert StoredCheckpoint(latest.uri).id.step == 10


def test_another_job_is_refused_unless_it_goes_on_from_exactly_this(storage_uri, tmp_path):
    publish(storage_uri, tmp_path, 1, 10, uid="old")
    stranger = publish(storage_uri, tmp_path, 5, 20, uid="new")
    assert stranger.refused
    assert "two jobs can't share a checkpoint URI" in stranger.error
    heir = publish(storage_uri, tmp_path, 1, 20, uid="new", continued=Continued("old", 1, 10))
    assert heir.durable.uid == "new"
    assert publish(storage_uri, tmp_path, 1, 30, uid="old").refused, "the first one lives, and is shut out now"
    assert publish(storage_uri, tmp_path, 1, 40, uid="new", continued=Continued("old", 1, 10)).durable.step == 40


def test_only_one_of_two_conditional_writes_wins(storage_uri):
    folder = ObjectPrefix(storage_uri, create=True)
    folder.put_if("LATEST", b"first", None)
    with pytest.raises(Changed):
        folder.put_if("LATEST", b"second", None)
    _, version = folder.get_version("LATEST")
    folder.put_if("LATEST", b"third", version)
    with pytest.raises(Changed):
        folder.put_if("LATEST", b"fourth", version)
    assert folder.get("LATEST") == b"third"


def test_a_large_object_goes_in_pieces_and_comes_back(storage_uri, tmp_path):
    size = 2 * PIECE + 12345
    content = random.Random(1).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    folder = ObjectPrefix(storage_uri, create=True)
    folder.put("whole", tmp_path / "file")
    buffers = itertools.cycle([memoryview(bytearray(PIECE // 3)) for _ in range(HELD + 1)])

    def pieces():
        for at in range(0, size, PIECE // 3):
            piece = next(buffers)[: size - at]
            piece[:] = content[at : at + len(piece)]
            yield piece

    folder.put_pieces("pieces", pieces(), size)
    assert folder.list("") == {"whole": size, "pieces": size}
    for key in ("whole", "pieces"):
        first, rest = bytearray(PIECE + 1), bytearray(size - PIECE - 2)
        folder.read_into(key, 1, [memoryview(first), memoryview(rest)])
        assert first + rest == content[1:]
        with pytest.raises(Missing):
            folder.read_into(key, 2, [memoryview(first), memoryview(rest)])


def test_a_missing_part_is_not_published(storage_uri, tmp_path):
    id = SnapshotId(1, 5, "layout", 2)
    config = Destination(uri=storage_uri)
    answer(Ship(id, 0, str(shard_file(tmp_path, id, 0))), config, "u1")
    assert "Part 1 of step 5 is not in storage yet" in answer(Publish(id), config, "u1").error
    assert read_latest(ObjectPrefix(storage_uri)) is None


def test_a_torn_shard_is_not_shipped(storage_uri, tmp_path):
    """A file that holds another snapshot than the one asked for (a slot that was used again)."""
    asked, held = SnapshotId(1, 5, "layout", 2), SnapshotId(1, 8, "layout", 2)
    shipped = answer(Ship(asked, 0, str(shard_file(tmp_path, held, 0))), Destination(uri=storage_uri), "u1")
    assert "holds shard 0 of step 8" in shipped.error


def test_an_older_checkpoint_that_is_continued_is_named_in_the_manifest(storage_uri, tmp_path):
    continued = Continued("old", 1, 10)
    durable = publish(storage_uri, tmp_path, 1, 20, continued=continued).durable
    manifest = StoredCheckpoint(durable.uri).manifest
    assert (manifest.continued, manifest.position, len(manifest.parts)) == (continued, 140, 2)


@pytest.mark.parametrize(
    ("uri", "change", "sentence"),
    [
        ("s3://nowhere/x", {}, "The bucket nowhere does not exist at http://127.0.0.1"),
        ("s3://train/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "refused the credentials for s3://train/x"),
        ("s3://train/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "http://127.0.0.1:9 can't be reached for"),
    ],
)
def test_a_probe_says_what_is_wrong_and_what_to_do(s3, monkeypatch, uri, change, sentence):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    state = answer(Probe(), Destination(uri=uri), "u1").storage
    assert state.state == "Error"
    assert sentence in state.message


def test_s3_restarted_during_a_checkpoint_is_waited_for(s3, tmp_path):
    uri = f"s3://train/{tmp_path.name}"
    publish(uri, tmp_path, 1, 5)
    s3.kill()
    id = SnapshotId(1, 6, "layout", 1)
    path = shard_file(tmp_path, id, 0)
    config = Destination(uri=uri)
    with pytest.raises(StorageError, match="can't be reached"):
        ObjectPrefix(uri, timedelta(seconds=1)).get("LATEST")
    s3.start()
    assert answer(Ship(id, 0, str(path)), config, "u1").error == ""
    assert answer(Publish(id), config, "u1").durable.step == 6


def test_the_manifest_of_a_damaged_latest_is_told(storage_uri):
    ObjectPrefix(storage_uri, create=True).put("LATEST", b"nonsense")
    state = answer(Probe(), Destination(uri=storage_uri), "u1").storage
    assert "LATEST is damaged" in state.message


# --- who reads while others delete ------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_being_read_stays_until_it_has_been(storage_uri, tmp_path):
    durable = publish(storage_uri, tmp_path, 1, 1).durable
    with lease(ObjectPrefix(durable.uri)):
        for step in (2, 3, 4):
            publish(storage_uri, tmp_path, 1, step)
        held = StoredCheckpoint(durable.uri)
        assert len(held.shards[1].read([(0, held.shards[1].file.size)])[0]) == held.shards[1].file.size
    publish(storage_uri, tmp_path, 1, 5)
    assert [place.step for place in found(ObjectPrefix(storage_uri).entries())[0]] in ([4, 5], [5, 4])
    with pytest.raises(StorageError, match=r"was deleted because|does not exist"):
        StoredCheckpoint(durable.uri)


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Publish a checkpoint. Return it, and a function that deletes it as a sweep does."""
    durable = publish(f"file://{tmp_path}/run", tmp_path, 1, 1, trainer=TRAINER.model_dump_json(by_alias=True)).durable
    folder = ObjectPrefix(f"file://{tmp_path}/run")
    now = max(entry.at for entry in folder.entries().values())
    return durable, lambda: remove(folder, CheckpointKey("u1", 1, 1), now)


@pytest.mark.parametrize("command", [["verify"], ["copy", "to"], ["export", "to"]])
def test_what_a_command_has_opened_stays_until_its_end(swept, tmp_path, monkeypatch, command):
    """The sweep comes as soon as the command has the manifest."""
    (durable, sweep), opened, results = swept, StoredCheckpoint.__init__, []

    def then_swept(self, uri):
        opened(self, uri)
        results.append(sweep())

    monkeypatch.setattr(StoredCheckpoint, "__init__", then_swept)
    name, *to = command
    done = CliRunner().invoke(app, [name, durable.uri, *(str(tmp_path / each) for each in to)])
    assert set(results) == {False}
    assert (
        "has no trainer section" if name == "export" else "is undamaged" if name == "verify" else "verified"
    ) in done.output
    assert sweep(), "nobody reads it any more"


def test_what_a_round_restores_stays_until_it_has_been_read(swept):
    (durable, sweep), results = swept, []
    state = SimpleNamespace(
        digest="layout",
        plan=lambda held: SimpleNamespace(shards=()),
        load=lambda plan, shards, step: results.append(sweep()),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        world = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
        start = Restore("Storage", 1, durable=durable)
        assert restore(start, "u1", state, TRAINER, None, "data", world, None).position == 7
    finally:
        dist.destroy_process_group()
    assert results == [False]
    assert sweep(), "nobody reads it any more"


def test_a_reader_that_comes_in_the_middle_of_a_deletion(storage_uri, tmp_path, monkeypatch):
    """Its lease is put after the first look for leases, and before the manifest goes: the manifest comes back."""
    durable = publish(storage_uri, tmp_path, 1, 1).durable
    whole = ObjectPrefix.delete

    def delete(self, keys):
        if keys and keys[0].endswith("step-1/manifest.json"):
            ObjectPrefix(durable.uri).put("readers/late", b"{}")
        whole(self, keys)

    monkeypatch.setattr(ObjectPrefix, "delete", delete)
    for step in (2, 3):
        publish(storage_uri, tmp_path, 1, step)
    assert StoredCheckpoint(durable.uri).manifest.id.step == 1


def test_what_the_job_before_left_is_collected_too(storage_uri, tmp_path):
    for step in (9, 10):
        publish(storage_uri, tmp_path, 1, step, uid="old")
    continued = Continued("old", 1, 10)
    for step in (11, 12):
        publish(storage_uri, tmp_path, 1, step, uid="new", continued=continued)
    assert {place.uid for place in found(ObjectPrefix(storage_uri).entries())[0]} == {"new"}


def test_a_manifest_says_what_made_it(storage_uri, tmp_path, monkeypatch, trainer):
    monkeypatch.setenv("CONCERTINA_JOB", "team/job")
    monkeypatch.setenv("CONCERTINA_IMAGE", "registry/trainer@sha256:abc")
    monkeypatch.setenv("CONCERTINA_COMMIT", "0123abc")
    monkeypatch.setenv("CONCERTINA_TRAINER", json.dumps(trainer))
    manifest = StoredCheckpoint(publish(storage_uri, tmp_path, 1, 1).durable.uri).manifest
    assert (manifest.version, manifest.job, manifest.code.commit) == (1, "team/job", "0123abc")
    assert manifest.code.image == "registry/trainer@sha256:abc"
    assert manifest.code.libraries["torch"] == torch.__version__.split("+")[0]
    assert (manifest.trainer["model"]["layers"], manifest.trainer["model"]["ropeTheta"]) == (2, 10000.0)
    assert manifest.parallelism == {"data": 2}
    assert manifest.code.libraries.keys() == {"concertina-sdk", "torch", "numpy", "obstore"}
    assert all(manifest.code.libraries.values())
    assert manifest.code.python == platform.python_version()
    assert (manifest.config, manifest.data, manifest.position) == ("config", "data", 7)
    assert (manifest.uid, manifest.id, manifest.complete) == ("u1", SnapshotId(1, 1, "layout", 2), False)
    for shard, part in enumerate(manifest.parts):
        content = shard_file(tmp_path, manifest.id, shard).read_bytes()
        begin = header_length(content[:8])
        assert part.key == f"shard-{shard}-of-2.safetensors"
        assert (part.size, part.crc32) == (len(content), zlib.crc32(content))
        assert (part.header_size, part.header_crc32) == (begin, zlib.crc32(content[:begin]))
