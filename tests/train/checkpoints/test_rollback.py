"""`LATEST` after a rollback: it names nothing that was undone, whoever comes late, and readers take nothing of it."""

import pytest

from builders.train.published import publish
from concertina_protocol import Undone
from concertina_protocol.worker_channel import Probe, Undo
from concertina_state.checkpoints import catalogue, rollback
from concertina_state.checkpoints.latest import read_all_of_latest
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
from concertina_state.checkpoints.retention import found, lease
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Continued
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, answer


def undo(uri, round, step, uid="u1"):
    return answer(Undo(Undone(round, step)), Destination(uri=uri), uid).storage.latest


def named(uri):
    latest = answer(Probe(), Destination(uri=uri), "new").storage.latest
    return latest and (latest.round, latest.step)


def test_latest_goes_back_and_what_was_undone_is_not_taken_any_more(storage_uri, tmp_path):
    publish(storage_uri, tmp_path, 3, 40)
    publish(storage_uri, tmp_path, 3, 55)
    assert undo(storage_uri, 3, 50).step == 40
    assert named(storage_uri) == (3, 40)
    late = publish(storage_uri, tmp_path, 3, 60)
    assert late.refused
    assert "step 60 of round 3 is no longer valid: training went back to step 50" in late.error
    assert publish(storage_uri, tmp_path, 3, 45).durable.step == 45, "this was not undone"
    assert undo(storage_uri, 3, 50).step == 45, "the same again does no harm"

    since = publish(storage_uri, tmp_path, 4, 48).durable
    assert StoredCheckpoint(since.uri).manifest.undone == (Undone(3, 50),)
    assert [place.step for place in sorted(found(ObjectPrefix(storage_uri).entries())[0], key=str)] == [45, 48], (
        "55 is gone"
    )
    assert undo(storage_uri, 3, 50).step == 48, "LATEST is past it"
    assert publish(storage_uri, tmp_path, 3, 60).refused


def test_a_second_rollback_passes_over_what_the_first_one_undid(storage_uri, tmp_path):
    publish(storage_uri, tmp_path, 1, 40)
    lost = publish(storage_uri, tmp_path, 1, 55).durable
    undo(storage_uri, 1, 50)
    manifest = StoredCheckpoint(lost.uri).manifest
    assert catalogue.undone(ObjectPrefix(storage_uri), [manifest]) == {manifest.place}, "it is there, and void"
    with lease(ObjectPrefix(lost.uri)):
        publish(storage_uri, tmp_path, 2, 70)
    assert StoredCheckpoint(lost.uri).manifest == manifest, "somebody read it, so it has stayed"
    assert undo(storage_uri, 2, 60).step == 40
    assert rollback.go_back(storage_uri, "u1", Undone(2, 60)).step == 40
    assert undo(storage_uri, 2, 39) is None, "and further back: nothing is left"


def test_where_nothing_from_before_is_left_latest_names_nothing(storage_uri, tmp_path):
    publish(storage_uri, tmp_path, 1, 55)
    assert undo(storage_uri, 1, 50) is None
    assert named(storage_uri) is None, "a job made again begins anew"
    with pytest.raises(InvalidInput, match="training went back and none from before is left"):
        resolve(storage_uri)
    assert publish(storage_uri, tmp_path, 1, 56).refused
    assert publish(storage_uri, tmp_path, 2, 3).durable.step == 3


def test_a_job_made_again_may_begin_anew_where_nothing_is_left(storage_uri, tmp_path):
    publish(storage_uri, tmp_path, 1, 55, uid="old")
    undo(storage_uri, 1, 50, uid="old")
    assert publish(storage_uri, tmp_path, 1, 5, uid="new").durable.step == 5
    assert publish(storage_uri, tmp_path, 2, 60, uid="old").refused


@pytest.mark.parametrize(("back_to", "left"), [(50, 50), (45, 40)])
def test_a_job_that_went_on_from_another_goes_back_to_that_one_s(storage_uri, tmp_path, back_to, left):
    for step in (40, 50):
        publish(storage_uri, tmp_path, 3, step, uid="old")
    ObjectPrefix(storage_uri).put("old/round-3/step-40/readers/one", b"{}")  # as `back` keeps it: for rollbacks
    first = publish(storage_uri, tmp_path, 1, 55, uid="new", continued=Continued("old", 3, 50))
    assert first.durable.uid == "new"

    now = undo(storage_uri, 1, back_to, uid="new")
    assert (now.uid, now.round, now.step) == ("old", 3, left)
    assert rollback.go_back(storage_uri, "new", Undone(1, back_to)) == now
    assert StoredCheckpoint(now.uri).id.step == left
    again = Continued("old", 3, left)
    assert publish(storage_uri, tmp_path, 1, 56, uid="new", continued=Continued("old", 3, 50)).refused
    assert publish(storage_uri, tmp_path, 2, 53, uid="new", continued=again).durable.step == 53


def test_where_what_it_went_on_from_has_gone_the_one_before_is_named(storage_uri, tmp_path):
    """Further back than it began: the other job's newest is, where nothing of before is left."""
    for step in (40, 50):
        publish(storage_uri, tmp_path, 3, step, uid="old")
    publish(storage_uri, tmp_path, 1, 55, uid="new", continued=Continued("old", 3, 50))
    assert not ObjectPrefix(storage_uri).list("old/round-3/step-40")
    assert undo(storage_uri, 1, 45, uid="new").step == 50
    assert rollback.go_back(storage_uri, "stranger", Undone(1, 45)) is None


def test_a_rollback_before_the_first_checkpoint_refuses_one_that_comes_late(storage_uri, tmp_path):
    assert undo(storage_uri, 1, 5) is None
    assert publish(storage_uri, tmp_path, 1, 9).refused
    assert named(storage_uri) is None
    assert publish(storage_uri, tmp_path, 2, 9).durable.step == 9


def test_a_publication_that_is_under_way_meanwhile_is_refused(storage_uri, tmp_path, monkeypatch):
    """Of the old round's uploader: it has looked at LATEST before the rollback, and writes after it."""
    publish(storage_uri, tmp_path, 1, 40)
    write = ObjectPrefix.put_if

    def put_if(self, key, value, version):
        monkeypatch.setattr(ObjectPrefix, "put_if", write)
        rollback.undo(ObjectPrefix(storage_uri), "u1", Undone(1, 50))
        write(self, key, value, version)

    monkeypatch.setattr(ObjectPrefix, "put_if", put_if)
    assert publish(storage_uri, tmp_path, 1, 55).refused
    assert named(storage_uri) == (1, 40)
    assert read_all_of_latest(ObjectPrefix(storage_uri)).undone == (Undone(1, 50),)
