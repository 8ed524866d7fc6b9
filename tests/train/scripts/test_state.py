"""Test `trainingjob.State` in scripts under real agents.

The scripts are killed and resized. They continue from node memory, from a peer's copy or from durable storage, and
train like an uninterrupted run.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import sys

import pytest

import concertina_protocol as p
from builders.programs import PROGRAMS
from builders.train.published import flip_a_byte
from builders.train.replicas import IMPORTED, UID, newest_complete, running, trained
from builders.train.stateful import NEAR, SCRIPT, check_losses, command, losses
from concertina_state.checkpoints.catalogue import verify
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve

LIMIT = 400.0
OTHER_STORE = pytest.mark.long(
    law="tests/train/scripts/test_state.py::test_what_no_memory_holds_comes_back_from_storage_and_the_end_is_in_it[s3]"
)
pytestmark = pytest.mark.timeout(LIMIT)


def starts(*replicas) -> set[tuple[int, int]]:
    """(world, step)"""
    found = re.findall(r"rank \d+ of (\d+) starts at step (\d+)", "".join(replica.log() for replica in replicas))
    return {(int(world), int(step)) for world, step in found}


def safe_at(step: int):
    return lambda report: report.progress is not None and (report.progress.snapshot_step or 0) >= step


# In the gate, test_run.py restores from memory, and the next test restores in another world.
@pytest.mark.long(law="tests/train/scripts/test_run.py::test_a_script_keeps_its_process")
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_script_goes_on_from_memory_in_any_world(folder, kind, undisturbed):
    async def body() -> None:
        async with running(folder, 3, command(kind), **IMPORTED) as job:
            await job.begin(1, job[0], job[1], job[2])
            report = await job.until(job[0], safe_at(5), "no snapshot")
            assert report.keeps_state
            os.kill(job[2].worker_pids()[2], signal.SIGKILL)
            report = await job.until(job[0], lambda r: r.failures, "the failure was not heard of")
            safe, last = report.progress.snapshot_step, report.progress.step

            prepared = await job.prepare(2, job[0], job[1], job[2])
            restore = newest_complete(prepared)
            assert safe <= restore.step <= last + 1
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r), "did not go on")
            assert report.progress.restored_step == restore.step

            job[0].kill()  # the coordinator and its memory
            await job.until(job[1], lambda r: r.failures, "the coordinator's end was not heard of")
            prepared = await job.prepare(3, job[1], job[2])
            restore = newest_complete(prepared)
            assert (restore.id.round, restore.id.shards) == (2, 3)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[1], lambda r: r.round == 3 and trained(restore.step + 5)(r), "two did not go on")

            job[0].start()
            drain = p.Drain(UID, 3, "claim-3", "a replica joins", durable=False, grace_seconds=60.0)
            assert isinstance(await job.call(job[1], drain), p.Accepted)
            report = await job.until(job[1], lambda r: r.state == "drained", "never drained")
            assert not report.failures
            stopped = report.progress.step
            prepared = await job.prepare(4, job[1], job[2], job[0])
            restore = newest_complete(prepared)
            assert restore.step == stopped, "a step was lost to a planned change"
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[1], lambda r: r.round == 4 and trained(restore.step + 5)(r), "three did not go on")
            assert (3, stopped) in starts(job[1], job[2])
            check_losses(job.replicas.values(), undisturbed)

    asyncio.run(body())


@pytest.mark.parametrize(
    "storage_uri", ["s3", *(pytest.param(kind, marks=OTHER_STORE) for kind in ("file", "az", "gs"))], indirect=True
)
def test_what_no_memory_holds_comes_back_from_storage_and_the_end_is_in_it(folder, storage_uri, undisturbed):
    spec = json.dumps({"uri": storage_uri, "everySteps": 10, "everySeconds": 600, "keep": 3})
    arguments = command("fsdp2", "--steps", "125", "--pause", "0.02")

    async def body() -> None:
        async with running(folder, 2, arguments, CONCERTINA_CHECKPOINT=spec, **IMPORTED, **credentials()) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], durable_at(20), "no checkpoint")
            for replica in (job[0], job[1]):
                replica.kill()
                for kind in ("snapshots", "copies", "fetched"):
                    shutil.rmtree(replica.folder / kind, ignore_errors=True)
            job[1].start()
            await job.begin(2, job[1])
            report = await job.until(job[1], lambda r: r.round == 2 and r.progress is not None, "did not go on")
            assert (report.progress.restored_step >= 20, report.progress.restored_from) == (True, "Storage")
            report = await job.until(job[1], lambda r: r.state == "succeeded", "never done")
            latest = report.storage.latest
            assert (latest.round, latest.step) == (2, 125)
            seen = losses("\n".join(job[i].log() for i in range(2)))
            assert sorted(seen) == list(range(125))
            for step, loss in seen.items():
                assert loss == pytest.approx(undisturbed[step], rel=NEAR, abs=NEAR), step

    asyncio.run(body())
    manifest = StoredCheckpoint(resolve(storage_uri)).manifest
    assert (manifest.id.step, manifest.parallelism) == (125, {"data": 1})
    lineage = manifest.lineage
    assert [(each.round, each.world) for each in lineage.rounds] == [(1, 2), (2, 1)]
    assert lineage.script == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert lineage.rounds[1].step <= lineage.parent.step < 125
    assert verify(StoredCheckpoint(resolve(storage_uri)), lambda count: None) == []


@pytest.mark.long(
    law="tests/train/trainer/test_damage.py::test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one[itself]"
)
def test_a_script_goes_on_from_the_checkpoint_before_a_damaged_one(folder, undisturbed):
    uri = (folder / "checkpoints").as_uri()
    spec = json.dumps({"uri": uri, "everySteps": 10, "everySeconds": 600, "onDamage": "UsePrevious"})
    arguments = command("fsdp2", "--steps", "400", "--pause", "0.02")

    async def body() -> None:
        async with running(folder, 2, arguments, CONCERTINA_CHECKPOINT=spec) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], durable_at(20), "no second checkpoint")
            for replica in (job[0], job[1]):
                replica.kill()
                for kind in ("snapshots", "copies", "fetched"):
                    shutil.rmtree(replica.folder / kind, ignore_errors=True)
            newest = StoredCheckpoint(resolve(uri))
            flip_a_byte(newest.uri, shard=1)
            for replica in (job[0], job[1]):
                replica.start()
            await job.begin(2, job[0], job[1])
            report = await job.until(job[0], lambda r: r.round == 2 and r.failures, "the damage was not heard of")
            failure = next(each for each in report.failures if each.rollback)
            assert (failure.rank, failure.reason, failure.permanent) == (1, "Damaged", False)
            back = failure.rollback
            assert (back.damaged.uri, back.damaged.step) == (newest.uri, newest.id.step)
            assert back.step < newest.id.step

            undone = p.Undone(2, back.step)
            restore = p.Restore("Fresh", undone=undone, damaged=(newest.uri,))
            await job.begin(3, job[0], job[1], restore=restore)
            report = await job.until(job[0], lambda r: r.round == 3 and trained(back.step + 3)(r), "did not go on")
            assert (report.progress.restored_step, report.progress.restored_from) == (back.step, "Storage")
            report = await job.until(job[0], durable_at(newest.id.step), "LATEST did not move on")
            assert report.storage.latest.round == 3
            for step, loss in losses("\n".join(job[i].log() for i in range(2))).items():
                assert loss == pytest.approx(undisturbed[step], rel=NEAR, abs=NEAR), step

    asyncio.run(body())


@pytest.mark.long(
    law="tests/unit/agent/core/test_scripts_state.py::test_where_ranks_have_different_last_snapshots_the_newest_that_all_have_is_the_last"
)
def test_a_script_that_does_not_wait_for_its_last_snapshot_ends_with_the_one_before(folder):
    spec = json.dumps({"uri": (folder / "checkpoints").as_uri(), "everySeconds": 600})
    unwaited = ["--", sys.executable, str(PROGRAMS / "unwaited.py")]

    async def body() -> None:
        async with running(folder, 2, unwaited, CONCERTINA_CHECKPOINT=spec, **IMPORTED) as job:
            await job.begin(1, job[0], job[1])
            report = await job.until(job[0], lambda r: r.state == "succeeded", "never done")
            last = int(re.search(r"snapshot of step (\d+)", job[0].log())[1])
            assert 0 < report.storage.latest.step < last
            assert not report.failures

    asyncio.run(body())
    assert verify(StoredCheckpoint(resolve((folder / "checkpoints").as_uri())), lambda count: None) == []


def durable_at(step: int):
    def holds(report: p.Report) -> bool:
        return report.storage is not None and report.storage.latest is not None and report.storage.latest.step >= step

    return holds


def credentials() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
