"""`trainingjob` in workers of real agents: what they report, and that all ranks save the same step before a change."""

import asyncio
import re
import signal
import sys

import pytest

import concertina_protocol as p
from builders.programs import PROGRAMS
from builders.train.replicas import UID, gone, running, trained

SCRIPT = PROGRAMS / "scripted.py"
ENDLESS = 10**9
DRAIN = p.Drain(UID, 1, "claim-1", "a replica joins", durable=False, grace_seconds=60.0)


def command(folder, steps: int = ENDLESS) -> list[str]:
    return ["--", sys.executable, str(SCRIPT), str(folder), str(steps)]


def saves(job) -> set[tuple[int, int]]:
    """(rank, step)"""
    logs = "\n".join(replica.log() for replica in job.replicas.values())
    return {(int(rank), int(step)) for rank, step in re.findall(r"rank (\d+) saves step (\d+)", logs)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_drain_makes_all_ranks_save_the_same_step_and_loses_none(folder, workers):
    async def body() -> None:
        async with running(folder, 3, command(folder), workers) as job:
            await job.begin(1, job[0], job[1], job[2])
            told = (await job.until(job[0], trained(20), "no progress")).progress
            assert (told.steps, told.tokens_per_second, told.phase) == (ENDLESS, 7.0, "training")
            assert told.loss == pytest.approx(1 / told.step)
            assert (told.tokens, told.metrics) == (10 * told.step, {"learning_rate": 0.5})
            assert told.restored_step == 0
            assert 0 < told.first_step_at <= told.at

            assert isinstance(await job.call(job[0], DRAIN), p.Accepted)
            report = await job.until(job[0], lambda report: report.state == "drained", "never drained")
            assert not report.failures
            done = saves(job)
            ((step,), ranks) = {step for _, step in done}, {rank for rank, _ in done}
            assert ranks == set(range(3 * workers))
            assert report.progress.step == step, "a step beyond the checkpoint was reported"

            await job.begin(2, job[1], job[0])
            told = (await job.until(job[1], lambda r: r.progress and r.round == 2, "no progress")).progress
            assert told.restored_step == step

    asyncio.run(body())


def test_what_a_script_reports_to_evaluate_counts_as_that_until_it_reports_again(folder):
    text = (
        "import time, trainingjob as t\nt.report(step=1)\nt.report(step=1, phase='evaluating')\ntime.sleep(0.5)\n"
        "t.report(step=2)\ntime.sleep(0.5)\nt.report(step=3, metrics={str(n): n for n in range(99)})\ntime.sleep(99)"
    )

    async def body() -> None:
        async with running(folder, 1, ["--", sys.executable, "-c", text]) as job:
            await job.begin(1, job[0])
            told = (await job.until(job[0], trained(3), "no progress")).progress
            assert told.seconds.keys() == {p.StepPart.EVALUATION}
            assert 0.5 <= told.seconds[p.StepPart.EVALUATION] < told.at - told.first_step_at - 0.4
            assert len(told.metrics) == p.MOST_METRICS

    asyncio.run(body())


def test_a_notice_to_a_replica_waits_for_the_step_that_all_agree_on(folder):
    async def body() -> None:
        async with running(folder, 2, command(folder)) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(5), "no progress")
            worker = job[1].worker_pids()[1]
            job[1].process.send_signal(signal.SIGTERM)
            await job.until(job[0], lambda r: r.members[job[1].name].state == "draining", "no notice")
            assert not gone(worker), "the worker was not left to finish its step"
            await job.call(job[0], DRAIN)
            report = await job.until(job[0], lambda r: r.state == "drained", "never drained")
            assert not report.failures
            assert {rank for rank, _ in saves(job)} == {0, 1}
            assert len({step for _, step in saves(job)}) == 1
            assert await asyncio.to_thread(job[1].process.wait, 60) == 143

    asyncio.run(body())


def test_a_script_behind_a_shell_and_a_process_of_its_own(folder):
    text = (
        "import os, trainingjob as t; t.report(step=3, loss=float('nan')); pid = os.fork()\n"
        "t.report(step=4) if pid == 0 else os.wait(); import time; pid and time.sleep(600)"
    )

    async def body() -> None:
        async with running(folder, 1, ["--", "sh", "-c", f'"$0" -c "{text}"; true', sys.executable]) as job:
            await job.begin(1, job[0])
            told = (await job.until(job[0], trained(3), "a script behind a shell is not heard")).progress
            assert told.step == 3
            assert told.loss != told.loss

    asyncio.run(body())


def test_a_command_that_does_not_ask_still_gets_sigterm(folder):
    text = "import trainingjob, time; trainingjob.report(step=1); time.sleep(600)"

    async def body() -> None:
        async with running(folder, 2, ["--", sys.executable, "-c", text]) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(1), "no progress")
            await job.call(job[0], DRAIN)
            await job.until(job[0], lambda report: report.state == "drained", "never drained")

    asyncio.run(body())
