"""Unfinished files of an uploader that was killed: they are deleted with the checkpoint that they were for."""

from builders.train.published import publish
from concertina_state.checkpoints.catalogue import prune, to_prune
from concertina_state.objects.file_writer import FileWriter
from concertina_state.objects.prefix import ObjectPrefix


def killed(folder, place):
    """Begin to write a shard, as an uploader does that is killed in the middle of it."""
    writer = FileWriter(folder / place / "shard-0-of-2.safetensors")
    writer.write(memoryview(b"half"))


def drafts(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*#*"))


def test_what_latest_has_passed_goes_and_what_may_still_be_finished_stays(tmp_path):
    run = tmp_path / "run"
    killed(run, "u1/round-1/step-1")
    killed(run, "u1/round-1/step-1")
    killed(run, "u0/round-9/step-9")
    (run / "u1/round-1/note#1").write_bytes(b"not ours")
    assert publish(f"file://{run}", tmp_path, 1, 2).error == ""
    assert drafts(run) == ["u0/round-9/step-9/shard-0-of-2.safetensors#1", "u1/round-1/note#1"]
    assert not (run / "u1/round-1/step-1").exists()

    killed(run, "u1/round-1/step-2")
    killed(run, "u1/round-2/step-3")
    killed(run, "u1/round-2/step-4")
    assert publish(f"file://{run}", tmp_path, 2, 3).error == ""
    left = [f"u1/round-2/step-{step}/shard-0-of-2.safetensors#1" for step in (3, 4)]
    assert drafts(run) == ["u0/round-9/step-9/shard-0-of-2.safetensors#1", "u1/round-1/note#1", *left]


def test_what_is_pruned_goes_with_them(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        assert publish(f"file://{run}", tmp_path, 1, step).error == ""
    killed(run, "u1/round-1/step-1")
    killed(run, "u1/round-1/step-2")
    folder = ObjectPrefix(f"file://{run}")
    assert prune(folder, to_prune(folder, 1, None)) == []
    assert drafts(run) == ["u1/round-1/step-2/shard-0-of-2.safetensors#1"]
    assert not (run / "u1/round-1/step-1").exists()
