"""Hangs, stopped workers and stragglers of the bundled trainer: who is behind is named, with its stack in the log."""

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.programs import FAULTS, PROGRAMS, SEARCH_PATH
from builders.train.replicas import Job, running, trained

TOLD = "tests/train/agent/test_hangs.py::test_a_script_that_hangs_is_told_by_its_stack[py-spy]"
STRAGGLER = "tests/simulation/stories/test_verdicts.py::test_a_straggler_is_found_and_replaced_where_that_is_wanted"


def environment(trainer, **more: str) -> dict[str, str]:
    """`faults` is a sitecustomize: it plays a fault in the trainer of the rank that the file FAULT names."""
    return {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 100_000}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
        "PYTHONPATH": f"{SEARCH_PATH}:{FAULTS}",
        "PACE": "0.02",
        **more,
    }


async def begin(job: Job, limits: p.Limits, count: int = 2) -> None:
    message = job.assignment(await job.prepare(1, *(job[i] for i in range(count))))
    await job.assign(p.Assign(**{**vars(message), "limits": limits}))
    await job.until(job[0], trained(10))


@pytest.mark.long(law=TOLD)
def test_a_worker_that_hangs_in_its_data_loader_is_the_suspect_and_its_stack_is_in_the_log(folder, trainer, data):
    fault = folder / "fault"

    async def body():
        async with running(folder, 2, ["--bundled"], **environment(trainer, FAULT=str(fault))) as job:
            await begin(job, p.Limits(hang_seconds=1.0))
            assert job[0].report.hang is None
            fault.write_text("1 read_forever")
            hang = (await job.until(job[0], lambda r: r.hang, "no hang was found")).hang
            assert (hang.replica, hang.rank, hang.phase, hang.suspects) == (job[1].name, 1, "loading data", 1)
            assert hang.others == "computing"
            assert hang.seconds >= 1.0
            assert any("read_forever" in line for line in hang.stack), hang.stack
            assert not job[0].report.failures, "what follows is the operator's to decide"
            assert "[rank 1]   File" in job[1].log()
            assert "read_forever" in job[1].log()
            assert "[rank 0]   File" in job[0].log()
            # It goes on: nothing hangs any more.
            fault.unlink()
            await job.until(job[0], lambda r: r.hang is None)

    asyncio.run(body())


COLLECTIVES = "tests/unit/agent/core/round/test_collectives.py"
LAW = f"{COLLECTIVES}::test_of_two_groups_the_one_is_named_whose_missing_rank_waits_for_nothing"


# On a busy machine, a rank's list of collectives can come after the time that the agent waits for it.
@pytest.mark.long(law=LAW)
def test_a_rank_that_hangs_in_its_forward_pass_is_told_with_the_collective_that_it_has_not_called(
    folder, trainer, data
):
    """All ranks compute: those that wait for another's weights do so in a collective."""
    fault = folder / "fault"

    async def body():
        async with running(folder, 2, ["--bundled"], **environment(trainer, FAULT=str(fault))) as job:
            await begin(job, p.Limits(hang_seconds=1.0))
            fault.write_text("0 compute_forever")
            hang = (await job.until(job[0], lambda r: r.hang, "no hang was found")).hang
            assert (hang.replica, hang.rank, hang.phase) == (job[0].name, 0, "computing")
            assert "compute_forever" in "\n".join(hang.stack[:4])
            collective = hang.collective
            assert collective is not None, "the flight recorders show for what rank 1 waits"
            assert (collective.missing, collective.missing_count, collective.waiting) == ((0,), 1, 1)
            assert collective.instead == ""
            assert f"[rank 1] process group {collective.group}: it waits in {collective.operation}" in job[1].log()

    asyncio.run(body())


PYTHON = [sys.executable, str(PROGRAMS / "stuck.py")]


@pytest.mark.parametrize(
    ("command", "path", "told"),
    [
        (PYTHON, Path(sys.executable).parent, "wait_for_what_never_comes (stuck.py:"),
        pytest.param(
            ["sh", "-c", f"{shlex.join(PYTHON)}; true"],
            Path(sys.executable).parent,
            "wait_for_what_never_comes (stuck.py:",
            marks=pytest.mark.long(law=TOLD),
        ),
        (PYTHON, "/usr/bin", "): state "),
    ],
    ids=["py-spy", "py-spy, of what a shell runs", "without py-spy"],
)
def test_a_script_that_hangs_is_told_by_its_stack(folder, command, path, told):
    """py-spy looks at it from outside where the image has it, else the kernel's view is all there is."""

    async def body():
        async with running(folder, 2, ["--", *command], PATH=f"{path}:/bin") as job:
            message = job.assignment(await job.prepare(1, job[0], job[1]))
            await job.assign(p.Assign(**{**vars(message), "limits": p.Limits(hang_seconds=1.0)}))
            hang = (await job.until(job[0], lambda r: r.hang, "no hang was found")).hang
            assert (hang.replica, hang.rank) == (job[1].name, 1)
            assert told in "\n".join(hang.stack)
            assert "(python" in hang.stack[0] or "(sh)" in hang.stack[0], "what the kernel knows comes first"
            assert told in job[1].log()

    asyncio.run(body())


@pytest.mark.long(law="tests/unit/agent/core/test_hangs.py::test_a_stopped_worker_is_a_failure_at_the_second_look")
def test_a_stopped_worker_fails_at_once(folder, trainer, data):
    async def body():
        async with running(folder, 2, ["--bundled"], **environment(trainer)) as job:
            await begin(job, p.Limits())
            os.kill(job[1].worker_pids()[1], signal.SIGSTOP)
            report = await job.until(job[0], lambda r: r.failures, "the stopped worker was not noticed")
            (failure,) = [failure for failure in report.failures if not failure.secondary]
            assert (failure.replica, failure.reason, failure.rank) == (job[1].name, "WorkerStopped", 1)
            await job.begin(2, job[0], job[1])
            await job.until(job[0], lambda r: r.round == 2 and trained(5)(r))

    asyncio.run(body())


@pytest.mark.long(law="tests/train/agent/test_commands.py::test_a_stopped_agent_is_silent_and_therefore_lost")
def test_a_stopped_agent_is_lost_after_its_silence(folder, trainer, data):
    async def body():
        async with running(folder, 2, ["--bundled"], **environment(trainer)) as job:
            await begin(job, p.Limits())
            job[1].process.send_signal(signal.SIGSTOP)
            report = await job.until(job[0], lambda r: r.failures, "the stopped agent was not noticed")
            assert {(f.replica, f.reason) for f in report.failures if not f.secondary} == {(job[1].name, "MemberLost")}
            await job.begin(2, job[0])
            await job.until(job[0], lambda r: r.round == 2 and trained(5)(r))
            job[1].process.send_signal(signal.SIGCONT)
            prepared = await job.prepare(3, job[0], job[1])  # back, and its old worker is gone
            await job.assign(job.assignment(prepared))
            await job.until(job[0], lambda r: r.round == 3 and trained(5)(r))

    asyncio.run(body())


@pytest.mark.long(law=STRAGGLER)
def test_a_slow_rank_is_named(folder, trainer, data):
    """It sleeps in its forward pass, so its steps take as long as those of the others, who wait for it in FSDP."""
    fault = folder / "fault"

    async def body():
        async with running(folder, 3, ["--bundled"], **environment(trainer, FAULT=str(fault))) as job:
            fault.write_text("2 slow 0.1")
            await begin(job, p.Limits(straggler_factor=2.0), 3)
            (found,) = (await job.until(job[0], lambda r: r.stragglers, "nobody was named")).stragglers
            assert (found.replica, found.rank) == (job[2].name, 2)
            assert found.seconds >= 0.1
            assert found.others < found.seconds / 2
            fault.write_text("")
            await job.until(job[0], lambda r: not r.stragglers, "it is slow no more")

    asyncio.run(body())
