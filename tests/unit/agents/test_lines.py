"""Limits of agents' lines: as long as their job needs, and together no more than the operator has memory for."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import tracemalloc
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import CREATED, LIMIT, MASTER, UID, agent, report
from builders.until import until_async
from concertina.agents.agent_lines import HeldLines
from concertina.agents.allowance import Allowance
from concertina.agents.authority import Authority
from concertina.agents.bounds import PIECE_BYTES, cut, line_limits
from concertina.agents.calls import ConnectionIdentity
from concertina.agents.connections import AgentConnections
from concertina.agents.streams import Lost, StreamEnd, follow
from concertina_agent.core.round.failures import brief, told
from concertina_agent.workers.stacks import KEEP_CHARACTERS, KEEP_LINES
from concertina_protocol.messages.ranges import MOST_RANGES

WIDEST = "\U0001f600"
"""Character that takes twelve bytes as JSON."""
LARGEST = 2**50
TEXT = WIDEST * 1024
RANGES = tuple((LARGEST + 2 * number, LARGEST + 2 * number + 1) for number in range(MOST_RANGES))
ROLLBACK = protocol.Rollback(LARGEST, RANGES)
DURABLE = protocol.Durable(UID, LARGEST, LARGEST, TEXT)
STORAGE = protocol.Storage(protocol.StorageHealth.ERROR, DURABLE, TEXT)


def largest_report(members: int) -> protocol.Report:
    """Return a report in which all ranks fail, with as much output as a worker has, after the round hung."""
    names = [f"{'n' * 58}-{index:04d}" for index in range(members)]
    failure = protocol.Failure(
        names[0], protocol.FailureReason.WORKER_EXITED_EARLY, TEXT, (WIDEST * 2000,) * 50, 8191, -127, LARGEST,
        at=1e9 + 1 / 3, provoked=True, rollback=ROLLBACK,
    )  # fmt: skip
    last = dataclasses.replace(failure, replica=names[-1], reason=protocol.FailureReason.INVALID_INPUT, permanent=True)
    ended = [*(dataclasses.replace(failure, replica=name) for name in names[:-1]), last]
    failed = {each.replica: dataclasses.replace(brief(each, members), rollback=None) for each in ended}
    stack = (WIDEST * KEEP_CHARACTERS,) * KEEP_LINES
    progress = protocol.Progress(
        LARGEST, LARGEST, 1 / 3, 1 / 3, 1 / 3, LARGEST, "checkpointing", 1e9 + 1 / 3, skipped=RANGES, waits_for=TEXT,
        shares=(LARGEST,) * 1024, metrics={f"{WIDEST * 60}{n:04d}": 1 / 3 for n in range(protocol.MOST_METRICS)},
    )  # fmt: skip
    return protocol.Report(
        names[0], "i" * 36, True, LARGEST, "c" * 40, protocol.State.FAILED, True,
        {
            name: protocol.MemberState(name, "i" * 36, LARGEST, "c" * 40, protocol.State.FAILED, LARGEST, failed[name])
            for name in names
        },
        told(ended, members), progress, protocol.Hang(names[0], 8191, LARGEST, "training", "training", 1 / 3, 8, stack),
        storage=STORAGE, startup_error=TEXT, warm_start_disabled_reason=TEXT, warm_start_skipped_modules=TEXT,
        tracking=TEXT, world_mismatch=TEXT,
    )  # fmt: skip


def largest_answer(candidates: int) -> protocol.Prepared:
    names = tuple(f"{'n' * 58}-{index:04d}" for index in range(candidates))
    snapshot = protocol.SnapshotId(LARGEST, LARGEST, "l" * 64, LARGEST)
    held = (protocol.HeldSnapshot(snapshot, tuple(range(10**6, 10**6 + 2048))),) * 4
    return protocol.Prepared(
        names[0], "i" * 36, LARGEST, "c" * 40, 1024, "h" * 253, names, held, STORAGE, unreachable=names
    )


@pytest.mark.parametrize("members", [1, 64, 1024])
def test_the_longest_lines_of_an_agent_are_within_the_limit(members: int) -> None:
    answer = protocol.encode(largest_answer(members))
    relayed = protocol.encode(protocol.Relayed("n" * 63, answer.decode().rstrip("\n")))
    lines = [protocol.encode(largest_report(members)), answer, relayed]
    limits = line_limits(members)
    assert max(map(len, lines)) <= limits.most_bytes
    for line in lines:
        protocol.decode(line, functools.partial(cut, limits=limits))


def test_a_line_beyond_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    """The line is never stored as a whole. The job here has one replica."""

    async def endless(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * PIECE_BYTES)
            await writer.drain()

    async def scenario() -> None:
        lost = list[Lost]()
        limits = line_limits(1)
        identity = ConnectionIdentity(UID, Authority(MASTER, UID, CREATED).client_context(), line_limits=lambda: limits)
        async with agent(endless, tmp_path) as address:
            tracemalloc.start()
            try:
                task = follow_into(lost, [], identity, address)
                await until_async(lambda: bool(lost), "the refusal", lambda: lost)
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            task.cancel()
            assert lost[0].end is StreamEnd.NOT_UNDERSTOOD
            assert lost[0].sentence.endswith(f"a line exceeds the limit of {limits.most_bytes} bytes")
            assert peak_bytes < 3 << 20

    asyncio.run(scenario())


def test_unfinished_lines_of_a_namespace_share_a_bound(tmp_path: Path) -> None:
    """A line without room is refused, short ones continue, and the room is free again at the stream's end."""
    begin = b"x" * 4 * PIECE_BYTES

    async def unfinished(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.encode(report()) + begin)
        await writer.drain()
        await asyncio.sleep(LIMIT)

    async def scenario() -> None:
        context = Authority(MASTER, UID, CREATED).client_context()
        held_lines = HeldLines(6 * PIECE_BYTES)
        identity = ConnectionIdentity(UID, context, allowance=Allowance(), held_lines=held_lines)
        first_lost, second_lost = list[Lost](), list[Lost]()
        reports = list[protocol.Report]()
        async with agent(unfinished, tmp_path) as address:
            first = follow_into(first_lost, reports, identity, address)
            await until_async(lambda: taken(held_lines, 3 * PIECE_BYTES), "a line that is held", lambda: first_lost)
            second = follow_into(second_lost, reports, identity, address)
            await until_async(lambda: bool(second_lost), "a refusal", lambda: second_lost)
            assert "beside others of its namespace" in second_lost[0].sentence
            assert len(reports) >= 2
            assert not first_lost
            for task in (first, second):
                task.cancel()
            await asyncio.wait([first, second])
            held_lines.take(6 * PIECE_BYTES)

    asyncio.run(scenario())


def taken(held_lines: HeldLines, count: int) -> bool:
    """Return whether this number of bytes is not free."""
    free_bytes = 6 * PIECE_BYTES - count
    try:
        held_lines.take(free_bytes + 1)
    except protocol.ProtocolError:
        return True
    held_lines.give_back(free_bytes + 1)
    return False


def follow_into(
    lost: list[Lost], reports: list[protocol.Report], identity: ConnectionIdentity, address: str
) -> asyncio.Task[None]:
    watch = protocol.Watch(UID, changes=True)
    return asyncio.create_task(follow(identity, address, lambda: watch, lambda _: None, reports.append, lost.append))


def test_the_limit_grows_with_the_job_and_does_not_shrink() -> None:
    async def scenario() -> None:
        connections = AgentConnections(lambda uid, at_once: None)
        for members, expected in ((2, 2), (64, 64), (3, 64)):
            await connections.open(UID, CREATED, MASTER, "a", members)
            identity = connections._jobs[UID].identity
            assert identity.line_limits() == line_limits(expected)
        connections.close()

    asyncio.run(scenario())
