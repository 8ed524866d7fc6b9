"""`trainingjob.run` under real agents: a script that survives a round goes on in its process."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.train.replicas import IMPORTED, UID, Job, Replica, newest_complete, running, trained
from builders.train.stateful import check_losses, command

pytestmark = pytest.mark.timeout(600)
LAW = "tests/train/scripts/test_run.py::test_a_script_keeps_its_process"
WARM_ROUNDS = 5
"""Round at which all caches have their size. The last one gives each process the same rank."""
GROWTH_KIB = 8 << 10
"""The most that the allocator of C may add."""


def pids(*replicas: Replica) -> list[int]:
    return [next(iter(replica.worker_pids().values())) for replica in replicas]


async def next_round(job: Job, round: int, members: Sequence[Replica], steps: int = 3) -> p.Restore:
    """Begin a round from what the members hold, and return that once it has trained."""
    prepared = await job.prepare(round, *members)
    restore = newest_complete(prepared)
    assert not [why for answer in prepared.values() for why in answer.replaced]
    await job.assign(job.assignment(prepared, restore))
    report = await job.until(
        members[0], lambda r: r.round == round and trained(restore.step + steps)(r), f"round {round} does not train"
    )
    assert report.progress.restored_step == restore.step
    return restore


def safe_at(step: int):
    return lambda report: report.progress is not None and (report.progress.snapshot_step or 0) >= step


def test_a_script_keeps_its_process(folder, undisturbed):
    """A rank is killed: the other one goes on where it was, and no more than one step is lost."""

    async def body() -> None:
        async with running(folder, 2, command("ddp", "--run", "--pause", "0.05"), **IMPORTED) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], safe_at(5), "no snapshot")
            survivor, killed = pids(job[0], job[1])
            os.kill(killed, signal.SIGKILL)
            report = await job.until(job[0], lambda r: any(not f.secondary for f in r.failures), "no failure")
            assert [f.reason for f in report.failures if not f.secondary] == ["WorkerSignaled"]
            restore = await next_round(job, 2, [job[0], job[1]])
            assert restore.step >= report.progress.step - 1
            assert pids(job[0]) == [survivor]
            assert pids(job[1]) != [killed]
            check_losses(job.replicas.values(), undisturbed)

    asyncio.run(body())


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_script_takes_other_ranks_in_other_worlds(folder, kind, undisturbed):
    async def body() -> None:
        async with running(folder, 3, command(kind, "--run")) as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], safe_at(5), "no snapshot")
            before = pids(job[1], job[2])
            await next_round(job, 2, [job[2], job[0], job[1]])
            job[0].kill()
            await next_round(job, 3, [job[2], job[1]])
            assert pids(job[1], job[2]) == before

            job[0].start()
            drain = p.Drain(UID, 3, "claim-3", "a replica joins", durable=False, grace_seconds=60.0)
            assert isinstance(await job.call(job[2], drain), p.Accepted)
            report = await job.until(job[2], lambda r: r.state == "drained", "never drained")
            assert not report.failures
            restore = await next_round(job, 4, [job[1], job[2], job[0]])
            assert restore.step == report.progress.step, "a step was lost to a planned change"
            assert pids(job[1], job[2]) == before
            check_losses(job.replicas.values(), undisturbed)

    asyncio.run(body())


@pytest.mark.long(law=LAW)
def test_meshes_of_an_earlier_round_do_not_count(folder, undisturbed):
    """Ranks change places while all meshes have the same ranks and names."""

    async def body() -> None:
        async with running(folder, 4, command("tensor", "--run")) as job:
            members = [job[number] for number in range(4)]
            await job.begin(1, *members)
            await job.until(job[0], safe_at(3), "no snapshot")
            before = pids(*members)
            await next_round(job, 2, members[::-1])
            await next_round(job, 3, [job[1], job[3], job[0], job[2]])
            assert pids(*members) == before
            check_losses(job.replicas.values(), undisturbed)

    asyncio.run(body())


@pytest.mark.long(law=LAW)
def test_a_script_that_does_not_leave_in_time_is_replaced(folder, undisturbed):
    async def body() -> None:
        async with running(folder, 2, command("ddp", "--run")) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], safe_at(3), "no snapshot")
            stays, stopped = pids(job[0], job[1])
            os.kill(stopped, signal.SIGSTOP)
            prepared = await job.prepare(2, job[0], job[1])
            assert [answer.replaced for answer in prepared.values()] == [(), (p.Replaced.STOPPED,)]
            await job.assign(job.assignment(prepared, newest_complete(prepared)))
            await job.until(job[0], lambda r: r.round == 2 and trained(8)(r), "does not go on")
            assert pids(job[0]) == [stays]
            assert pids(job[1]) != [stopped]
            check_losses(job.replicas.values(), undisturbed)

    asyncio.run(body())


def used(pid: int) -> tuple[int, int, int]:
    """Open files, threads, and resident KiB of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_rounds_leave_nothing_behind_in_a_script(folder, kind):
    async def body() -> None:
        async with running(folder, 2, command(kind, "--run", "--pause", "0.05")) as job:
            members = [job[0], job[1]]
            await job.begin(1, *members)
            await job.until(job[0], safe_at(1), "no snapshot")
            before = []
            for round in range(2, 22):
                members = members[::-1]
                await next_round(job, round, members, steps=2)
                now = [used(pid) for pid in pids(job[0], job[1])]
                before = now if round == WARM_ROUNDS else before
            for (files, threads, resident), (more_files, more_threads, more_resident) in zip(before, now, strict=True):
                assert more_files <= files + 2
                assert more_threads <= threads + 2
                assert more_resident <= resident + GROWTH_KIB

    asyncio.run(body())
