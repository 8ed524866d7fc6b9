"""The trainer under real agents: a worker is killed, then an agent with its node's memory, and the run completes."""

import asyncio
import json
import os

import pytest

from builders.train.replicas import Job, newest_complete, running, trained

LAW = "tests/drill/test_drills.py::test_the_drill_passes[kill-worker]"


@pytest.mark.long(law=LAW)
def test_a_run_survives_a_worker_and_an_agent_and_ends_durable(folder, trainer, tmp_path):
    bucket = tmp_path / "checkpoints"
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 60}),
        "CONCERTINA_CHECKPOINT": json.dumps({"uri": f"file://{bucket}", "everySteps": 25}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
    }

    async def body(job: Job) -> None:
        await job.begin(1, job[0], job[1], job[2])
        await job.until(job[0], trained(10))
        os.kill(job[1].worker_pids()[1], 9)
        report = await job.until(job[0], lambda r: any(not f.secondary for f in r.failures))
        assert [f.reason for f in report.failures if not f.secondary] == ["WorkerSignaled"]

        prepared = await job.prepare(2, job[0], job[1], job[2])
        restore = newest_complete(prepared)
        assert restore.step >= 9
        await job.assign(job.assignment(prepared, restore))
        report = await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r))
        assert (report.progress.restored_step, report.progress.restored_from) == (restore.step, "Memory")

        job[0].kill()
        prepared = await job.prepare(3, job[2], job[1])
        restore = newest_complete(prepared)
        assert restore.id.round == 2
        await job.assign(job.assignment(prepared, restore))
        report = await job.until(job[2], lambda r: r.state == "succeeded", "never succeeded")
        assert report.progress.position == 60 * 7
        latest = report.storage.latest
        assert (latest.round, latest.step, latest.complete) == (3, 60, True)
        assert not list(folder.rglob("shipping-*"))

    async def main() -> None:
        async with running(folder, 3, ["--bundled"], **environment) as job:
            await body(job)

    asyncio.run(main())
