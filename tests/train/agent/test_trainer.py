"""The whole replica: agents, the bundled trainer with torch, snapshots in memory; the test speaks as the operator."""

import asyncio
import contextlib
import json
import os

import pytest

import concertina_protocol as p
from builders.train.replicas import UID, newest_complete, running, trained
from concertina_protocol.sidecar import COPY_SLOTS, SNAPSHOT_SLOTS


def environment(trainer, data, **more) -> dict[str, str]:
    del data
    return {"CONCERTINA_TRAINER": json.dumps({**trainer, **more}), "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"]}


def shard_files(replica):
    """How many states its volume holds: slots, copies, what was pulled, what is on its way to storage."""
    found = set()
    for path in (path for kind in ("snapshots", "copies", "fetched") for path in (replica.folder / kind).rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if ".json" not in path.name and path.is_file():
                found.add(path.stat().st_ino)
    return len(found)


@contextlib.asynccontextmanager
async def most_shard_files(job):
    """Return the largest number of shard files that any replica has had at a time."""
    most = [0]

    async def look():
        while True:
            most[0] = max(
                most[0], *await asyncio.to_thread(lambda: [shard_files(one) for one in job.replicas.values()])
            )
            await asyncio.sleep(0.1)

    looking = asyncio.ensure_future(look())
    try:
        yield most
    finally:
        looking.cancel()


@pytest.mark.long(law="tests/drill/test_drills.py::test_the_drill_passes[kill-worker]")
def test_a_killed_worker_and_a_killed_agent_cost_at_most_the_snapshot_interval(folder, trainer, data):
    """3 replicas train; a worker is killed, all go on; a whole replica is killed, two go on; a third joins; the end."""

    async def body():
        steps = environment(trainer, data, steps=70)
        async with running(folder, 3, ["--bundled"], **steps) as job, most_shard_files(job) as most:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], trained(20))
            assert 4 <= most[0] <= SNAPSHOT_SLOTS + COPY_SLOTS, "more than the plan has counted on"
            os.kill(job[2].worker_pids()[2], 9)
            report = await job.until(job[0], lambda r: r.failures)
            on_peers = report.progress.snapshot_step
            prepared = await job.prepare(2, job[0], job[1], job[2])
            restore = newest_complete(prepared)
            assert restore.step >= on_peers >= 1
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 10)(r))
            assert (report.progress.restored_step, report.progress.restored_from) == (restore.step, "Memory")
            assert not report.failures

            job[0].kill()
            report = await job.until(job[1], lambda r: r.failures)
            prepared = await job.prepare(3, job[1], job[2])
            restore = newest_complete(prepared)
            assert (restore.id.round, restore.id.shards) == (2, 3)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[1], lambda r: r.round == 3 and trained(restore.step + 5)(r))

            job[0].start()
            drain = p.Drain(UID, 3, "claim-3", "a replica joins", durable=False, grace_seconds=30)
            assert isinstance(await job.call(job[1], drain), p.Accepted)
            report = await job.until(job[1], lambda r: r.state == "drained")
            drained_at = report.members[job[1].name].step
            stay = job[2].worker_pids()[1], job[1].worker_pids()[0]
            prepared = await job.prepare(4, job[2], job[1], job[0])
            restore = newest_complete(prepared)
            assert restore.step == drained_at, "a drain costs no step"
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[2], lambda r: r.state == "succeeded", "never succeeded")
            assert (job[2].worker_pids()[0], job[1].worker_pids()[1]) == stay, (
                "members that stay keep their processes, with other ranks"
            )
            assert (report.progress.step, report.progress.position) == (70, 70 * trainer["globalBatchSize"])
            assert not report.failures

    asyncio.run(body())


@pytest.mark.long(
    law="tests/train/agent/test_bundled.py::test_durable_drain_and_completion_wait_for_a_bucket_that_is_not_there_yet"
)
def test_the_final_checkpoint_is_under_latest(folder, trainer, data):
    checkpoint = json.dumps({"uri": f"file://{folder}/durable", "everySteps": 5})
    more = {**environment(trainer, data), "CONCERTINA_CHECKPOINT": checkpoint}

    async def body():
        async with running(folder, 2, ["--bundled"], **more) as job:
            await job.begin(1, job[0], job[1])
            report = await job.until(job[0], lambda r: r.state == "succeeded", "never succeeded")
            assert (report.storage.state, report.storage.latest.step) == ("Ready", trainer["steps"])
            assert report.storage.latest.complete
            assert f'"step": {trainer["steps"]}' in (folder / "durable" / "LATEST").read_text()

            prepared = await job.prepare(2, job[1], job[0])
            restore = p.Restore("Storage", trainer["steps"], durable=report.storage.latest)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[1], lambda r: r.round == 2 and r.state == "succeeded", "never succeeded again")

    asyncio.run(body())


@pytest.mark.long(law="tests/train/trainer/test_data.py::test_a_mistake_in_the_configuration_is_bad_input")
def test_a_wrong_configuration_is_a_permanent_failure_with_a_sentence(folder, trainer, data):
    async def body():
        async with running(folder, 1, ["--bundled"], **environment(trainer, data, globalBatchSise=3)) as job:
            await job.begin(1, job[0])
            report = await job.until(job[0], lambda r: r.failures)
            (failure,) = report.failures
            assert (failure.reason, failure.permanent) == ("InvalidInput", True)
            assert "globalBatchSise" in failure.message

    asyncio.run(body())
