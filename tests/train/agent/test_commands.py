"""Agents running a command of one's own: real processes, TLS and sockets; the test speaks as the operator."""

import asyncio
import json
import os
import signal
import sys

import pytest

import concertina_protocol as p
from builders.train.replicas import GIVE_UP, UID, gone, running


def script(text: str) -> list[str]:
    return ["--", sys.executable, "-c", text]


SLEEPS = script("import time; print('up', flush=True); time.sleep(600)")


async def died(pid: int) -> None:
    async with asyncio.timeout(GIVE_UP):
        while not gone(pid):
            await asyncio.sleep(0.01)


async def printed(replica, text: str) -> None:
    async with asyncio.timeout(GIVE_UP):
        while text not in replica.log():
            await asyncio.sleep(0.01)


def run(body) -> None:
    asyncio.run(body())


def test_three_replicas_succeed_with_torchruns_variables(folder):
    names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR OMPI_COMM_WORLD_SIZE SLURM_PROCID TORCHELASTIC_RUN_ID"
    text = f"import os; print('VARS', *(os.environ[n] for n in {names.split()!r}), flush=True)"

    async def body():
        async with running(folder, 3, script(text), workers=2) as job:
            await job.begin(1, job[0], job[1], job[2])
            report = await job.until(job[0], lambda r: r.state == "succeeded", "never succeeded")
            assert {m.state for m in report.members.values()} == {"succeeded"}
            ip = job[0].address.partition(":")[0]
            lines = [line for replica in job.replicas.values() for line in replica.log().splitlines() if "VARS" in line]
            assert sorted(lines) == [f"[rank {n}] VARS {n} {n % 2} 6 {n // 2} {ip} 6 {n} {UID}" for n in range(6)]

    run(body)


def test_worker_0_which_serves_the_store_comes_before_the_others(folder):
    async def body():
        async with running(folder, 2, SLEEPS, workers=2) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], lambda r: r.members and all(m.state == "running" for m in r.members.values()))
            after: dict[int, float] = {}
            for replica in job.replicas.values():
                events = replica.events()
                (assigned,) = [event["t"] for event in events if event["event"] == "Assign"]
                after |= {each["rank"]: each["t"] - assigned for each in events if each["event"] == "worker_started"}
            assert after.keys() == {0, 1, 2, 3}
            assert min(after[1] - after[0], after[2], after[3]) > 0.09, after

    run(body)


def test_an_agent_that_is_slow_to_answer_is_reachable(folder):
    """As on a node whose cores all belong to workers."""

    async def body():
        async with running(folder, 2, SLEEPS) as job:
            await job.ready()
            slow = job[1].process
            slow.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.5, slow.send_signal, signal.SIGCONT)
            prepared = await job.prepare(1, job[0], job[1])
            assert prepared[job[0].name].reachable == tuple(job.names)

    run(body)


@pytest.mark.long(
    law="tests/unit/agent/core/test_coordinator.py::test_a_coordinator_that_stood_still_itself_does_not_accuse_its_members"
)
def test_a_machine_that_stood_still_costs_no_round(folder):
    """All agents pause, and the coordinator runs first: it has heard of nobody for too long."""

    async def body():
        async with running(folder, 3, SLEEPS) as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], lambda r: all(m.state == "running" for m in r.members.values()) and r.members)
            for replica in job.replicas.values():
                replica.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(p.SILENCE_SECONDS + 0.5)
            job[0].report = None
            job[0].process.send_signal(signal.SIGCONT)
            report = await job.until(job[0], lambda r: True, "the coordinator never runs again")
            for replica in (job[1], job[2]):
                replica.process.send_signal(signal.SIGCONT)
                replica.report = None
                await job.until(replica, lambda r: True, "a member never runs again")
            assert (report.state, report.failures) == ("running", ())
            assert [replica.report.failures for replica in job.replicas.values()] == [(), (), ()]

    run(body)


def test_a_killed_worker_is_named_and_the_next_round_runs_without_it(folder):
    async def body():
        async with running(folder, 3, SLEEPS) as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], lambda r: all(m.state == "running" for m in r.members.values()) and r.members)
            await printed(job[2], "up")
            victim, survivor = job[2].worker_pids()[2], job[0].worker_pids()[0]
            os.kill(victim, 9)
            report = await job.until(job[0], lambda r: r.failures, "the coordinator never heard of the failure")
            (failure,) = report.failures
            assert (failure.replica, failure.rank, failure.reason) == (job[2].name, 2, "WorkerSignaled")
            assert failure.message == "Rank 2 was killed by SIGKILL."
            assert failure.last_lines == ("up",)
            assert (report.state, report.members[job[2].name].state) == ("running", "failed")
            assert not gone(survivor), "only a Prepare may kill the others"

            prepared = await job.prepare(2, job[1], job[0])
            assert gone(survivor), "Prepared was said while a worker of the older round lived"
            assert prepared[job[0].name].reachable == (job[1].name, job[0].name)
            await job.assign(job.assignment(prepared))
            report = await job.until(
                job[1], lambda r: r.coordinator and r.round == 2 and len(r.members) == 2, "no round 2"
            )
            await job.until(job[1], lambda r: all(m.state == "running" for m in r.members.values()))
            assert not report.failures

    run(body)


def test_a_worker_that_raises_is_quoted(folder):
    text = (
        "import os, time; os.environ['RANK'] == '0' and time.sleep(600); print('before'); raise ValueError('bad row')"
    )

    async def body():
        async with running(folder, 2, script(text)) as job:
            await job.begin(1, job[0], job[1])
            report = await job.until(job[0], lambda r: r.failures)
            (failure,) = report.failures
            assert failure.reason == "WorkerFailed"
            assert failure.message == "Rank 1 exited with code 1: ValueError: bad row"
            assert "before" in failure.last_lines
            assert failure.last_lines[-1] == "ValueError: bad row"

    run(body)


def test_a_lost_agent_is_a_lost_member_and_a_lost_coordinator(folder):
    async def body():
        async with running(folder, 3, SLEEPS) as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], lambda r: r.members and all(m.state == "running" for m in r.members.values()))
            worker = job[2].worker_pids()[2]
            job[2].kill()
            report = await job.until(job[0], lambda r: r.failures)
            assert [(f.replica, f.reason) for f in report.failures] == [(job[2].name, "MemberLost")]
            await died(worker)

            job.watch(job[1])
            job[0].kill()
            report = await job.until(job[1], lambda r: r.failures)
            assert [(f.replica, f.reason) for f in report.failures] == [(job[1].name, "CoordinatorLost")]
            assert report.state == "failed"

    run(body)


def test_a_stopped_agent_is_silent_and_therefore_lost(folder):
    async def body():
        async with running(folder, 2, SLEEPS) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], lambda r: r.members and all(m.state == "running" for m in r.members.values()))
            job[1].process.send_signal(19)
            report = await job.until(job[0], lambda r: r.failures)
            assert report.failures[0].reason == "MemberLost"
            assert "has not answered for" in report.failures[0].message
            prepared = await job.prepare(2, job[0])  # its ping to the stopped one would not be answered either
            assert prepared[job[0].name].reachable == (job[0].name,)

    run(body)


def test_an_agent_started_again_remembers_what_it_saw_and_is_another_instance(folder):
    async def body():
        async with running(folder, 2, SLEEPS) as job:
            prepared = await job.prepare(5, job[0], job[1])
            job[1].kill()
            job[1].start()
            late = job.assignment(prepared)
            answer = await job.call(job[1], late)
            assert isinstance(answer, p.Refused)
            assert "not prepared" in answer.reason
            older = await job.call(job[1], p.Prepare(UID, 4, "claim-4", ()))
            assert isinstance(older, p.Refused)
            assert (older.round, older.claim) == (5, "claim-5")
            other = await job.call(job[1], p.Prepare(UID, 5, "another", ()))
            assert isinstance(other, p.Refused)
            again = await job.prepare(5, job[0], job[1])
            assert again[job[0].name] == prepared[job[0].name], "the same Prepare again has the same answer"
            assert again[job[1].name].instance != prepared[job[1].name].instance
            answer = await job.call(job[1], late)
            assert isinstance(answer, p.Refused)
            assert "not a member" in answer.reason

    run(body)


def test_a_drain_is_sigterm_and_grace(folder):
    text = """
import os, signal, sys, time
def leave(*_):
    print('saved', flush=True)
    if os.environ['RANK'] == '0':
        sys.exit(3)
signal.signal(signal.SIGTERM, leave)
print('up', flush=True)
while True:
    time.sleep(0.05)
"""

    async def body():
        async with running(folder, 2, script(text)) as job:
            await job.begin(1, job[0], job[1])
            await printed(job[0], "up")
            await printed(job[1], "up")
            stubborn = job[1].worker_pids()[1]
            drain = p.Drain(UID, 1, "claim-1", "scale", durable=False, grace_seconds=1.0)
            refused = await job.call(job[1], drain)
            assert isinstance(refused, p.Refused)
            assert "does not coordinate" in refused.reason
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            report = await job.until(job[0], lambda r: r.state == "drained", "never drained")
            assert {m.state for m in report.members.values()} == {"drained"}
            assert not report.failures
            assert gone(stubborn)
            assert job[0].log().splitlines().count("saved") == job[1].log().splitlines().count("saved") == 1

    run(body)


@pytest.mark.parametrize("warm", [False, True])
def test_a_drain_reaches_workers_that_are_only_being_started(folder, warm):
    (folder / "sleeps.py").write_text("import time; time.sleep(600)")
    environment = {"CONCERTINA_WARM_START": json.dumps({"enabled": warm, "preload": []})}

    async def body():
        async with running(folder, 2, ["--", sys.executable, str(folder / "sleeps.py")], **environment) as job:
            await job.begin(1, job[0], job[1])
            drain = p.Drain(UID, 1, "claim-1", "scale", durable=False, grace_seconds=50.0)
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            await job.until(job[0], lambda r: r.state == "drained", "never drained")
            events = [e for replica in (job[0], job[1]) for e in replica.events()]
            ended = [-e["code"] for e in events if e["event"] == "worker_ended"]
            not_started = [e["signal"] for e in events if e["event"] == "worker_not_started"]
            assert [*ended, *not_started] == [signal.SIGTERM] * 2

    run(body)


def test_what_workers_leave_behind_dies_with_their_round(folder):
    text = """
import os, subprocess, sys, time
child = subprocess.Popen(['sleep', '600'], start_new_session=True)
print('CHILD', child.pid, flush=True)
time.sleep(600)
"""

    async def body():
        async with running(folder, 1, script(text)) as job:
            await job.begin(1, job[0])
            await printed(job[0], "CHILD")
            child = int(job[0].log().partition("CHILD ")[2].split()[0])
            assert not gone(child)
            await job.prepare(2, job[0])
            assert gone(child)

    run(body)


def test_a_notice_ends_an_agent_when_its_workers_have_had_their_grace(folder):
    async def body():
        async with running(folder, 2, SLEEPS) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], lambda r: r.members and all(m.state == "running" for m in r.members.values()))
            job[1].process.send_signal(15)
            assert job[1].process.wait(20) == 143
            report = await job.until(job[0], lambda r: r.members[job[1].name].state != "running")
            assert report.members[job[1].name].state in ("draining", "drained", "failed")

    run(body)


def test_a_command_that_is_not_there_is_a_start_failure_with_a_sentence(folder):
    async def body():
        async with running(folder, 1, ["--", "/no/such/program"]) as job:
            await job.begin(1, job[0])
            report = await job.until(job[0], lambda r: r.failures)
            assert report.failures[0].reason == "StartFailed"
            assert "'/no/such/program' can't be started: No such file or directory" in report.failures[0].message

    run(body)


@pytest.mark.parametrize("missing", ["CONCERTINA_UID", "CONCERTINA_POD_IP"])
def test_a_wrong_pod_is_told_in_a_sentence(missing):
    import subprocess

    environment = {"CONCERTINA_REPLICA": "a", "CONCERTINA_UID": "u", "CONCERTINA_POD_IP": "127.0.0.1"}
    del environment[missing]
    command = [sys.executable, "-m", "concertina_agent.main", "run", "--bundled"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"{missing} is missing, which the operator sets" in ended.stderr
