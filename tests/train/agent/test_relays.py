"""What is said to many agents goes through some of them: real agents, and the operator's own connections."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

import concertina_protocol as p
from builders.train.replicas import MASTER_KEY, UID, Job, running
from builders.until import until_async
from concertina.agents import calls as calls_module
from concertina.agents import connections as module
from concertina.agents.calls import connection
from concertina.agents.connections import AgentConnections
from concertina.plan.actions import Send

SLEEPS = ["--", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
ALONE = "tests/train/agent/test_relays.py::test_the_next_round_begins_over_the_coordinators_stream_alone"
AGENTS = 6
"""Of whom three pass on what is said to the other three."""


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that the operator has called itself; more than two are told by relays."""
    called: list[str] = []
    original = module.call

    async def call(identity, address, request, begun):
        called.append(address)
        return await original(identity, address, request, begun)

    monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(module, "RELAYED_ABOVE", 2)
    return called


@contextlib.asynccontextmanager
async def operator(job: Job) -> AsyncIterator[AgentConnections]:
    connections = AgentConnections(lambda uid, at_once: None)
    await connections.open(UID, job.created, MASTER_KEY)
    try:
        yield connections
    finally:
        connections.close()


async def told(connections: AgentConnections, job: Job, message, *names: str) -> dict[str, object]:
    """Return the answer of each agent, or the reason why it has not answered."""
    kind = module.CALLS[type(message)]
    sends = [Send(name, job.replicas[name].address, message) for name in names]
    assert [send.replica for send in connections.send(UID, sends)] == list(names)

    def ended() -> dict[str, object]:
        calls = {name: getattr(view, kind) for name, view in connections.views(UID).items()}
        return {name: calls[name].reply or calls[name].error for name in names if calls[name].done_at is not None}

    await until_async(lambda: len(ended()) == len(names), "all answers", ended)
    return ended()


def prepare(job: Job, round: int = 1) -> p.Prepare:
    candidates = tuple(p.Candidate(replica.name, replica.address) for replica in job.replicas.values())
    return p.Prepare(UID, round, f"claim-{round}", candidates)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long(law=f"{ALONE}[4]")), 4])
def test_the_next_round_begins_over_the_coordinators_stream_alone(folder, monkeypatch, count):
    """The operator makes a handshake with each replica to learn that it is ready, and none after that."""
    dialled: list[str] = []
    opened = calls_module._opened

    async def counted(identity, address, waits):
        dialled.append(address)
        return await opened(identity, address, waits)

    monkeypatch.setattr(calls_module, "_opened", counted)

    async def body():
        async with running(folder, count, SLEEPS) as job, operator(job) as connections:
            first, *others = job.names
            connections.watch(UID, {name: job.replicas[name].address for name in job.names})
            await until_async(
                lambda: all(view.ready_at for view in connections.views(UID).values()), "all are ready", connections
            )
            dialled.clear()
            for round in (1, 2, 3):
                prepared = await told(connections, job, prepare(job, round), *job.names)
                assert {name: answer.replica for name, answer in prepared.items()} == {name: name for name in job.names}
                accepted = await told(connections, job, job.assignment(prepared), *job.names)
                assert set(accepted.values()) == {p.Accepted(round, f"claim-{round}")}
                connections.watch(UID, {first: job[0].address})
                members = lambda: connections.views(UID)[first].report.members  # noqa: E731
                await until_async(
                    lambda: [(m.round, m.state) for m in members().values()] == [(round, p.State.RUNNING)] * count,  # noqa: B023
                    "all members run",
                    members,
                )
            assert dialled == []
            job[0].kill()
            answers = await told(connections, job, prepare(job, 4), *others)
            assert all(isinstance(answer, p.Prepared) for answer in answers.values()), answers
            assert set(dialled) - {job[0].address} == {job.replicas[name].address for name in others}

    asyncio.run(body())


def test_a_round_begins_by_what_agents_pass_on(folder, direct):
    async def body():
        async with running(folder, AGENTS, SLEEPS) as job, operator(job) as connections:
            prepared = await told(connections, job, prepare(job), *job.names)
            assert {name: answer.replica for name, answer in prepared.items()} == {name: name for name in job.names}
            for answer in prepared.values():
                assert answer.reachable == tuple(job.names)
            accepted = await told(connections, job, job.assignment(prepared), *job.names)
            assert set(accepted.values()) == {p.Accepted(1, "claim-1")}
            assert direct == []
            report = await job.until(
                job[0], lambda r: [m.state for m in r.members.values()] == [p.State.RUNNING] * AGENTS
            )
            assert not report.failures

    asyncio.run(body())


LOST = "tests/train/agent/test_relays.py::test_who_was_to_be_told_by_one_that_is_lost_is_told_all_the_same[9]"


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long(law=LOST))])
def test_who_was_to_be_told_by_one_that_is_lost_is_told_all_the_same(folder, direct, fault):
    async def body():
        async with running(folder, AGENTS, SLEEPS) as job, operator(job) as connections:
            os.kill(job[0].process.pid, fault)  # the first of the first part
            answers = await told(connections, job, prepare(job), *job.names)
            assert job[0].address in answers[job[0].name], "the error names it"
            lived = job.names[1:]
            assert [answers[name].replica for name in lived] == lived
            assert sorted(direct) == sorted([job[0].address, job[3].address]), "its own part alone"

    asyncio.run(body())


def test_one_that_can_not_be_reached_by_who_was_to_tell_it_is_called_by_the_operator(folder, direct):
    async def body():
        async with running(folder, AGENTS, SLEEPS) as job, operator(job) as connections:
            job[3].kill()  # told by the first
            answers = await told(connections, job, prepare(job), *job.names)
            assert "can't be reached" in answers[job[3].name]
            assert all(isinstance(answers[name], p.Prepared) for name in job.names if name != job[3].name)
            assert direct == [job[3].address]

    asyncio.run(body())


def test_the_same_said_twice_is_answered_the_same(folder, direct):
    """An operator that has just come carries on with the claim of the one before."""

    async def body():
        async with running(folder, AGENTS, SLEEPS) as job:
            answers = []
            for _ in range(2):
                async with operator(job) as connections:
                    answers.append(await told(connections, job, prepare(job), *job.names))
            assert answers[0] == answers[1]
            async with operator(job) as connections:
                refused = await told(connections, job, prepare(job, round=0), *job.names)
                assert all(isinstance(answer, p.Refused) for answer in refused.values())

    asyncio.run(body())


def test_agents_pass_on_nothing_but_the_begin_of_a_round(folder):
    async def body():
        async with running(folder, 2, SLEEPS) as job:
            to = tuple(p.Candidate(replica.name, replica.address) for replica in job.replicas.values())
            drain = p.encode(p.Drain(UID, 0, "", "no", False, 1.0)).decode().rstrip("\n")
            for line, own, other in (
                (drain, "Drain is never forwarded", "agent may not send Drain"),
                ("{}", "not a message of this protocol", "not a message of this protocol"),
            ):
                said = {}
                async with connection(job.identity, job[0].address, p.Relay(UID, line, to)) as wire:
                    for _ in to:
                        answer = await wire.receive(10.0)
                        said[answer.replica] = answer.error or p.decode(answer.line.encode()).reason
                assert own in said[job[0].name]
                assert other in said[job[1].name]

    asyncio.run(body())
