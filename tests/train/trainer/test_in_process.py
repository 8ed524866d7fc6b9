"""Workers that stay in their process from round to round, under real agents."""

import asyncio
import json
import os

from builders.train.replicas import newest_complete, running, trained


def test_survivors_keep_their_process(folder, trainer):
    """A worker is killed, then a replica; the other workers go on in the process in which they began."""
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 60}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
    }

    async def body(job):
        await job.begin(1, job[0], job[1], job[2])
        await job.until(job[0], trained(10))
        before = [replica.worker_pids() for replica in job.replicas.values()]
        os.kill(before[1][1], 9)
        report = await job.until(job[0], lambda r: any(not f.secondary for f in r.failures))
        assert [f.reason for f in report.failures if not f.secondary] == ["WorkerSignaled"]

        prepared = await job.prepare(2, job[0], job[1], job[2])
        restore = newest_complete(prepared)
        await job.assign(job.assignment(prepared, restore))
        await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r))
        second = [replica.worker_pids() for replica in job.replicas.values()]
        assert (second[0], second[2]) == (before[0], before[2])
        assert second[1] != before[1]

        job[0].kill()
        prepared = await job.prepare(3, job[2], job[1])
        await job.assign(job.assignment(prepared, newest_complete(prepared)))
        report = await job.until(job[2], lambda r: r.state == "succeeded", "never succeeded")
        assert (job[2].worker_pids()[0], job[1].worker_pids()[1]) == (before[2][2], second[1][1])
        assert report.progress.position == 60 * 7

    async def main():
        async with running(folder, 3, ["--bundled"], **environment) as job:
            try:
                await body(job)
            finally:
                for r in job.replicas.values():
                    print("=====", r.name)
                    print(r.log()[-6000:])

    asyncio.run(main())
