"""Workers that stay in their process from round to round, under real agents."""

import asyncio
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.train import node
from builders.train.replicas import UID, newest_complete, running, trained
from builders.until import until

STEPS = 120
"""Enough that each round of a survivor is ended by the test: one process takes a few milliseconds for a step."""
WARM_ROUNDS = 5
"""Rounds after which all caches have their size."""
LAYOUTS = ({}, {"tensor": 2})
GROUPS = (("1", "0"), ("5", "0"))
"""Numbers of process groups of a process in each layout, before and after it leaves the round."""
GROWTH_KIB = 8 << 10
"""The most that the allocator of C may add."""


def test_survivors_keep_their_process(folder, trainer):
    """A replica joins, a worker is killed, then the other replica.

    A worker that stays in the world goes on in the process in which it began.
    """
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": STEPS}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
    }

    async def body(job):
        await job.begin(1, job[0])
        await job.until(job[0], trained(1))
        alone = job[0].worker_pids()
        drain = p.Drain(UID, 1, "claim-1", "a replica joins", durable=False, grace_seconds=30)
        assert isinstance(await job.call(job[0], drain), p.Accepted)
        report = await job.until(job[0], lambda r: r.state == "drained", "never drained")
        prepared = await job.prepare(2, job[0], job[1])
        restore = newest_complete(prepared)
        assert restore.step == report.members[job[0].name].step, "a drain costs no step"
        await job.assign(job.assignment(prepared, restore))
        await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r))
        before = [replica.worker_pids() for replica in job.replicas.values()]
        assert before[0] == alone
        os.kill(before[1][1], 9)
        report = await job.until(job[0], lambda r: any(not f.secondary for f in r.failures))
        assert [f.reason for f in report.failures if not f.secondary] == ["WorkerSignaled"]

        prepared = await job.prepare(3, job[0], job[1])
        restore = newest_complete(prepared)
        await job.assign(job.assignment(prepared, restore))
        await job.until(job[0], lambda r: r.round == 3 and trained(restore.step + 5)(r))
        third = [replica.worker_pids() for replica in job.replicas.values()]
        assert third[0] == before[0]
        assert third[1] != before[1]

        job[0].kill()
        prepared = await job.prepare(4, job[1])
        await job.assign(job.assignment(prepared, newest_complete(prepared)))
        report = await job.until(job[1], lambda r: r.state == "succeeded", "never succeeded")
        assert job[1].worker_pids()[0] == third[1][1]
        assert report.progress.position == STEPS * trainer["globalBatchSize"]

    async def main():
        async with running(folder, 2, ["--bundled"], **environment) as job:
            try:
                await body(job)
            finally:
                for r in job.replicas.values():
                    print("=====", r.name)
                    print(r.log()[-6000:])

    asyncio.run(main())


def used(pid: int) -> tuple[int, int, int]:
    """Return the numbers of open files and threads, and the resident KiB of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])


@pytest.mark.parametrize(
    "rounds",
    [
        20,
        pytest.param(
            200, marks=pytest.mark.long(law="tests/train/trainer/test_in_process.py::test_rounds_leave_nothing_behind")
        ),
    ],
)
def test_rounds_leave_nothing_behind(folder, parent, trainer, rounds):
    """After the first rounds, no process has more files, threads or memory, and none keeps a process group.

    Two processes change ranks in each round, and the layout changes in each second one.
    """
    model = {**trainer["model"], "kvHeads": 2}
    job = node.Job(folder, parent, {**trainer, "steps": 10_000, "model": model}, stays=True)
    job.worker = "workers.counted_groups:main"
    restore, first = node.FRESH, []
    for i in range(rounds):
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(LAYOUTS[i // 2 % 2])
        job.run(2, restore, node.Script(drain=(2 * i + 2, False)))
        restore = job.newest()
        for old in folder.glob("node-*/*/round-*"):  # as agents do
            if int(old.name.partition("-")[2]) < job.number:
                shutil.rmtree(old)
        assert len(job.survivors) == 2
        pids = sorted(survivor.pid for survivor in job.survivors)
        if i == WARM_ROUNDS:
            first = [used(pid) for pid in pids]
        if i > WARM_ROUNDS:  # what a round had is freed beside the next one's preparation
            for pid, before in zip(pids, first, strict=True):
                until(partial(within, pid, before), f"no more than {before}", seen=partial(used, pid))
    groups = re.findall(r"groups: (\d+), then (\d+)", (folder / "round-1.log").read_text())
    assert groups == [GROUPS[i // 2 % 2] for i in range(rounds) for _ in pids]


def test_survivors_keep_their_shards_open(folder, parent, trainer):
    """They would refuse a missing file if they opened it again."""
    data = folder / "data"
    shutil.copytree(trainer["data"]["uri"], data)
    job = node.Job(folder, parent, {**trainer, "steps": 100, "data": {"uri": str(data), "groups": 1}}, stays=True)
    job.run(2, script=node.Script(drain=(2, False)))
    restore = job.newest()
    for shard in data.glob("*.bin"):
        shard.unlink()
    outcome = job.run(2, restore, node.Script(drain=(4, False)))
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert max(outcome.losses) >= 4
    assert len(job.survivors) == 2


def within(pid: int, before: tuple[int, int, int]) -> bool:
    files, threads, resident = used(pid)
    return files <= before[0] + 2 and threads <= before[1] + 2 and resident <= before[2] + GROWTH_KIB
