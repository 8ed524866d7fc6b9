"""The owner of a folder of checkpoints: decided by the store, in every kind of storage."""

import asyncio
import contextlib
import json
import threading

import pytest

import concertina_protocol as p
from builders.stores import hostile
from builders.train.published import publish
from builders.train.replicas import UID, running
from concertina_protocol.worker_channel import Probe
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.owner import OWNER, Owner, Ownership, decide
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Continued
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, answer
from trainingjob._restore import newest_in_storage

OLD, NEW = Owner("old", "team", "run"), Owner("new", "team", "run")
THEIRS = Owner("old", "another", "run")


@pytest.fixture
def of_job(monkeypatch):
    """Return a function that looks at storage as a pod of this namespace and name does."""

    def look(uri, uid, job="team/run", living=(), take_over="", owned=False):
        monkeypatch.setenv("CONCERTINA_JOB", job)
        return answer(Probe(owned, living), Destination(uri=uri, take_over=take_over), uid)

    return look


def owner(uri):
    return json.loads(ObjectPrefix(uri).get(OWNER) or b"null")


@pytest.mark.parametrize(
    ("found", "living", "take_over", "verdict"),
    [
        (None, None, "", Ownership.CREATE),
        (NEW, None, "", Ownership.OWNS),
        (NEW, ("old",), "old", Ownership.OWNS),
        (OLD, None, "", Ownership.UNDECIDED),
        (OLD, (), "", Ownership.TAKE_OVER),
        (OLD, ("third",), "third", Ownership.TAKE_OVER),
        (OLD, ("old",), "", Ownership.REFUSED),
        (OLD, ("old",), "third", Ownership.REFUSED),
        (OLD, ("old",), "old", Ownership.TAKE_OVER),
        (THEIRS, None, "", Ownership.REFUSED),
        (THEIRS, (), "", Ownership.REFUSED),
        (THEIRS, (), "old", Ownership.TAKE_OVER),
    ],
)
def test_what_a_job_may_do_with_a_folder(found, living, take_over, verdict):
    assert decide(found, NEW, living, take_over) is verdict


def test_the_first_job_owns_the_folder_and_its_successor_takes_it_over_with_the_checkpoints(
    storage_uri, tmp_path, of_job
):
    first = of_job(storage_uri, "old")
    assert (first.storage.state, first.owned) == ("Ready", True)
    assert owner(storage_uri) == {"uid": "old", "namespace": "team", "name": "run", "latest": None}
    publish(storage_uri, tmp_path, 1, 10, "old")

    refused = of_job(storage_uri, "new", living=("old",))
    assert (refused.storage.state, refused.owned) == ("Error", False)
    assert "belongs to the TrainingJob team/run (uid old)" in refused.storage.message
    assert "set checkpoint.takeOver: old" in refused.storage.message
    assert owner(storage_uri)["uid"] == "old"

    looked = of_job(storage_uri, "new", living=None)
    assert (looked.storage.state, looked.owned) == ("Ready", False), "the operator has not said whether it lives"
    assert of_job(storage_uri, "new").owned
    assert owner(storage_uri)["uid"] == "new"
    assert owner(storage_uri)["latest"] == {"uid": "old", "round": 1, "step": 10}


def test_a_job_of_another_namespace_is_refused_before_it_writes_or_begins(storage_uri, of_job):
    assert of_job(storage_uri, "old").owned
    for living in (None, ()):
        refused = of_job(storage_uri, "new", "another/run", living)
        assert refused.storage.state == "Error"
        assert "another namespace" in refused.storage.message
    assert of_job(storage_uri, "new", "another/run", take_over="old").owned
    assert "takeOver: new" in of_job(storage_uri, "old").storage.message


def test_of_many_first_writers_one_owns_the_folder(storage_uri, of_job):
    answers, ready = {}, threading.Barrier(4)

    def begin(uid):
        ready.wait()
        others = tuple(f"job-{other}" for other in range(4))
        answers[uid] = of_job(storage_uri, uid, living=others)

    threads = [threading.Thread(target=begin, args=(f"job-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [uid for uid, state in answers.items() if state.owned]
    assert owner(storage_uri)["uid"] == winner
    assert all("takeOver" in state.storage.message for uid, state in answers.items() if uid != winner)


def test_a_store_that_ignores_conditions_is_refused_by_name(tmp_path, monkeypatch, of_job):
    def overwrites(self, key, value, version):
        self.put(key, value)

    monkeypatch.setattr(ObjectPrefix, "put_if", overwrites)
    uri = f"file://{tmp_path}/checkpoints"
    for _ in range(2):
        refused = of_job(uri, "old")
        assert refused.storage.message.startswith(f"{uri} ignores conditional writes")
    assert owner(uri) is None


def test_a_store_that_refuses_conditions_is_named(s3, tmp_path, monkeypatch, of_job):
    with hostile.proxy(s3.endpoint) as proxy:
        proxy.faults += [("PUT", OWNER, "501")] * 1000
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        message = of_job(f"s3://train/{tmp_path.name}", "old").storage.message
    assert message.startswith(f"{proxy.url} does not support conditional writes (write OWNER")


def test_a_script_does_not_go_on_from_the_checkpoint_of_another_namespace(tmp_path, monkeypatch, of_job):
    uri = f"file://{tmp_path}/checkpoints"
    of_job(uri, "old")
    publish(uri, tmp_path, 1, 10, "old")
    monkeypatch.setenv("CONCERTINA_UID", "new")
    with contextlib.ExitStack() as reading:
        assert newest_in_storage({"uri": uri}, reading).step == 10, "it may be the successor"
        monkeypatch.setenv("CONCERTINA_JOB", "another/run")
        with pytest.raises(InvalidInput, match="takeOver: old"):
            newest_in_storage({"uri": uri}, reading)
        assert newest_in_storage({"uri": uri, "takeOver": "old"}, reading).step == 10


def test_what_the_owner_before_publishes_late_is_replaced_by_the_owner(tmp_path, of_job):
    """A pod of the job that is gone was cut off and goes on: it must not shut its successor out for good."""
    uri = f"file://{tmp_path}/checkpoints"
    of_job(uri, "old")
    publish(uri, tmp_path, 1, 10, "old")
    of_job(uri, "new")
    assert publish(uri, tmp_path, 1, 15, "old").durable.step == 15
    begun = Continued("old", 1, 10)
    assert publish(uri, tmp_path, 1, 12, "third", begun).refused, "no owner"
    assert publish(uri, tmp_path, 1, 12, "new", begun).durable.step == 12
    assert publish(uri, tmp_path, 1, 20, "old").refused
    assert read_latest(ObjectPrefix(uri)).uid == "new"


def test_an_owner_object_that_is_damaged_is_named(tmp_path, of_job):
    uri = f"file://{tmp_path}/checkpoints"
    ObjectPrefix(uri, create=True).put(OWNER, b"{")
    assert f"{uri}/OWNER is damaged" in of_job(uri, "old").storage.message


@pytest.mark.long(
    law="tests/unit/agent/test_uploads.py::test_the_folder_is_owned_before_anything_of_a_round_is_written"
)
def test_agents_own_the_folder_from_the_beginning_of_a_round(folder, trainer, tmp_path):
    """Check the owner with real agents and uploaders.

    While a job of this namespace exists, the agents of another job can't write to its folder. Once it is deleted, the
    next round of the other job takes the folder over.
    """
    uri = f"file://{tmp_path}/checkpoints"
    ObjectPrefix(uri, create=True).put(OWNER, json.dumps({"uid": "old", "namespace": "test", "name": "x"}).encode())
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 1_000_000}),
        "CONCERTINA_CHECKPOINT": json.dumps({"uri": uri, "everySteps": 5}),
    }

    async def body():
        async with running(folder, 2, ["--bundled"], **environment) as job:
            await job.until(job[0], lambda r: r.storage.state == "Ready", "never looked")
            assert owner(uri)["uid"] == "old"
            first = job.assignment(await job.prepare(1, job[0], job[1]))
            await job.assign(p.Assign(**{**vars(first), "living": ("old",)}))
            await job.until(job[0], lambda r: "takeOver: old" in r.storage.message, "it was not refused")
            assert owner(uri)["uid"] == "old"
            assert read_latest(ObjectPrefix(uri)) is None
            await job.begin(2, job[0], job[1])
            await job.until(job[0], lambda r: r.storage.latest, "never published")
            assert owner(uri)["uid"] == UID

    asyncio.run(body())
