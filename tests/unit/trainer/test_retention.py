"""Checkpoints that may be deleted."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from builders.train.published import publish, shard_file
from concertina_protocol import SnapshotId, Undone
from concertina_protocol.worker_channel import Ship
from concertina_state.checkpoints.catalogue import prune, to_prune
from concertina_state.checkpoints.manifest import CheckpointKey
from concertina_state.checkpoints.retention import Keeping, doomed
from concertina_state.format.shardfile import Continued
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, answer

ANY = st.builds(CheckpointKey, st.sampled_from(["ours", "before"]), st.integers(1, 3), st.integers(1, 30))
PLACES = st.sets(ANY, min_size=1)


def age(place: CheckpointKey) -> tuple[bool, int, int]:
    return place.uid == "ours", place.round, place.step


@given(PLACES, PLACES, st.integers(1, 5), st.none() | st.integers(1, 10))
def test_what_is_kept(
    finished: set[CheckpointKey], unfinished: set[CheckpointKey], keep: int, every: int | None
) -> None:
    latest = max({*finished, CheckpointKey("ours", 1, 1)}, key=age)
    finished, unfinished = {*finished, latest}, unfinished - finished - {latest}
    gone = doomed(finished | unfinished, finished, latest, Keeping(keep, every))
    assert latest not in gone
    assert len(set(gone)) == len(gone)
    newest = sorted(finished, key=age)[-keep:]
    assert not set(newest) & set(gone)
    assert {place for place in unfinished if place in gone} == {p for p in unfinished if age(p) < age(latest)}
    stays = finished - set(gone)
    assert every is not None or len(stays) == len(newest)
    after = [place for place in finished if place not in gone]
    assert doomed(after, after, latest, Keeping(keep, every)) == [], "what has stayed once stays"


def test_every_mth_is_kept_and_what_was_gone_over_again_is_not() -> None:
    steps = [CheckpointKey("u", 1, step) for step in (500, 1000, 1500, 2000, 2500, 3000)]
    again = [CheckpointKey("u", 2, step) for step in (2400, 2900, 3400, 3900)]
    finished = [*steps, *again]
    gone = doomed(finished, finished, again[-1], Keeping(1, 1000))
    assert [place.step for place in finished if place not in gone] == [1000, 2000, 3400, 3900]


def test_one_from_before_what_a_rollback_may_undo_is_kept_and_what_was_undone_is_not_counted() -> None:
    steps = [CheckpointKey("u", 1, step) for step in (10, 20, 30, 40, 50)]
    gone = doomed(steps, steps, steps[-1], Keeping(1, back=(25, 12, 100)))
    assert [place.step for place in steps if place not in gone] == [20, 30, 50]
    again = [*steps, CheckpointKey("u", 2, 35)]
    gone = doomed(again, again, again[-1], Keeping(2), [Undone(1, 30)])
    assert [place.step for place in again if place not in gone] == [30, 35]


def test_there_is_nothing_to_prune_in_a_folder_that_another_process_has_emptied(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert prune(ObjectPrefix(f"file://{tmp_path}/run"), [CheckpointKey("old", 1, 3)]) == []


def test_what_a_job_that_goes_on_from_latest_ships_is_not_pruned(tmp_path: Path) -> None:
    """Only its uid makes it older than LATEST. Objects that existed when LATEST moved are older too."""
    uri = f"file://{tmp_path}/run"
    new, continued = CheckpointKey("new", 1, 8), Continued("old", 2, 7)

    def ship(place: CheckpointKey) -> None:
        id = SnapshotId(place.round, place.step, "layout", 2)
        path = shard_file(tmp_path, id, 0, continued)
        assert answer(Ship(id, 0, str(path)), Destination(uri), place.uid).error == ""

    left = CheckpointKey("older", 1, 3)
    ship(left)
    for step in (6, 7):
        assert publish(uri, tmp_path, 2, step, "old").error == ""
    for path in (tmp_path / "run" / left.folder).iterdir():
        os.utime(path, (1.0, 1.0))
    ship(new)
    (tmp_path / "run" / left.folder / "readers").mkdir()
    (tmp_path / "run" / left.folder / "readers" / "one").write_bytes(b"{}")
    folder = ObjectPrefix(uri)
    gone = to_prune(folder, 1, None)
    assert gone == [left, CheckpointKey("old", 2, 6)]
    assert prune(folder, gone) == [left], "it is being read"
    assert publish(uri, tmp_path, 1, 8, "new", continued).error == ""
    assert to_prune(folder, 1, None) == [left, CheckpointKey("old", 2, 7)]
