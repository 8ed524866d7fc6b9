"""Damaged newest checkpoint: the choice of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders.train.published import publish
from concertina_protocol import Durable, Restore, RestoreSource, Undone
from concertina_state.checkpoints.catalogue import instead_of
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.checkpoints.rollback import before_damaged, usable
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.format.shardfile import Continued


def test_a_damaged_checkpoint_names_the_newest_other_one_and_how_to_use_it(tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    for step in (40, 60):
        assert publish(run.as_uri(), scratch, 1, step).durable
    newest, older = (run / "u1" / "round-1" / f"step-{step}" for step in (60, 40))
    (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:100])
    with pytest.raises(DamagedInput) as damaged:
        StoredCheckpoint(newest.as_uri())
    assert instead_of(damaged.value) == (
        " The newest other checkpoint is from step 40. To continue from it, create the job again with "
        "checkpoint.resumeFrom: "
        f"{older.as_uri()} and another, empty folder in checkpoint.uri."
    )
    (older / "manifest.json").unlink()
    assert instead_of(damaged.value) == f" {run.as_uri()} has no other finished checkpoint."
    assert instead_of(DamagedInput("a shard of data is damaged")) == ""
    assert instead_of(InvalidInput("the data are not there")) == ""


def damage(durable: Durable) -> DamagedInput:
    """Cut a checkpoint's manifest off, and return the error of reading it."""
    manifest = Path(durable.uri.removeprefix("file://"), "manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(DamagedInput) as damaged:
        StoredCheckpoint(durable.uri)
    return damaged.value


def published(
    run: Path, scratch: Path, *steps: int, uid: str = "u1", continued: Continued | None = None
) -> list[Durable]:
    scratch.mkdir(exist_ok=True)
    made = [publish(run.as_uri(), scratch, 1, step, uid, continued).durable for step in steps]
    return [each for each in made if each is not None]


def from_storage(*bad: Durable, undone: Undone | None = None) -> Restore:
    return Restore(RestoreSource.STORAGE, damaged=tuple(each.uri for each in bad), undone=undone)


def test_the_newest_checkpoint_before_a_damaged_one_is_gone_on_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    older, newest = published(run, tmp_path / "scratch", 40, 60)
    rollback = before_damaged(damage(newest), run.as_uri(), "u1", from_storage())
    assert rollback is not None
    assert rollback.damaged is not None
    assert (rollback.step, rollback.damaged.uri, rollback.damaged.step) == (40, newest.uri, 60)
    assert rollback.undoes("u1")
    chosen_checkpoint = usable(newest, "u1", from_storage(newest, undone=Undone(1, 40)))
    assert chosen_checkpoint is not None
    assert (chosen_checkpoint.uri, chosen_checkpoint.step) == (older.uri, 40)
    assert usable(older, "u1", from_storage(newest)) == older
    assert Path(newest.uri.removeprefix("file://")).exists(), "nothing is deleted"


def test_a_run_that_damage_has_left_no_checkpoint_ends_by_name_and_never_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    older, newest = published(run, tmp_path / "scratch", 40, 60)
    damage(newest)
    last = damage(older)
    with pytest.raises(
        DamagedInput, match=f"No checkpoint is left to continue from. Damaged: {newest.uri}, {older.uri}"
    ):
        before_damaged(last, run.as_uri(), "u1", from_storage(newest))
    with pytest.raises(DamagedInput, match="No checkpoint is left to continue from"):
        usable(newest, "u1", from_storage(newest, older))


def test_a_job_passes_over_damaged_checkpoints_of_the_one_before_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    older, newest = published(run, tmp_path / "scratch", 40, 60, uid="old")
    rollback = before_damaged(damage(newest), run.as_uri(), "new", from_storage())
    assert rollback is not None
    assert (rollback.step, rollback.undoes("new")) == (40, False)
    chosen_checkpoint = usable(newest, "new", from_storage(newest))
    assert chosen_checkpoint is not None
    assert (chosen_checkpoint.uid, chosen_checkpoint.uri) == ("old", older.uri)


def test_a_job_whose_own_checkpoint_is_damaged_goes_back_to_the_one_that_it_began_with(tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    _, begun = published(run, scratch, 40, 60, uid="old")
    (own,) = published(run, scratch, 70, uid="new", continued=Continued("old", 1, 60))
    chosen_checkpoint = usable(own, "new", from_storage(own))
    assert chosen_checkpoint is not None
    assert (chosen_checkpoint.uid, chosen_checkpoint.uri) == ("old", begun.uri)


def test_damage_elsewhere_than_in_the_job_s_own_folder_ends_the_job(tmp_path: Path) -> None:
    other = tmp_path / "other"
    _, newest = published(other, tmp_path / "scratch", 40, 60)
    assert before_damaged(damage(newest), (tmp_path / "run").as_uri(), "u1", from_storage()) is None
    assert before_damaged(DamagedInput("a shard of data"), other.as_uri(), "u1", from_storage()) is None
