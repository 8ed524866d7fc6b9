"""A connection between two living agents is reset: the round goes on. An agent that dies is lost at once."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import concertina_protocol as p
from builders.train.replicas import running
from builders.until import until_async
from concertina_protocol.addresses import split

IDLE = ["--", sys.executable, "-c", "import time; time.sleep(600)"]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """A port that passes all on to an agent. Both ends see a reset when `reset` is called."""

    def __init__(self, to: str) -> None:
        self._to = to
        self.streams: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward = await asyncio.open_connection(*split(self._to))
        self.streams.append((writer, onward))
        await asyncio.gather(_copy(reader, onward), _copy(onward_reader, writer))

    def reset(self) -> None:
        open_ones = [writer for stream in self.streams for writer in stream if not writer.is_closing()]
        for writer in open_ones:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            writer.transport.abort()

    def close(self) -> None:
        self.reset()
        self._server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
    except OSError:
        pass
    writer.close()


def test_a_reset_between_two_living_agents_ends_no_round_and_a_death_does(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, 2, IDLE) as job:
            coordinator, member = job[0], job[1]
            proxy = Proxy(coordinator.address)

            def member_is(*states: str) -> Callable[[p.Report], bool]:
                return lambda report: member.name in report.members and report.members[member.name].state in states

            try:
                assign = job.assignment(await job.prepare(1, coordinator, member))
                through = dataclasses.replace(assign.members[0], address=await proxy.start())
                by_proxy = dataclasses.replace(assign, members=(through, *assign.members[1:]))
                assert isinstance(await job.call(coordinator, assign), p.Accepted)
                assert isinstance(await job.call(member, by_proxy), p.Accepted)
                await job.until(coordinator, member_is("running"), "no stream")

                before = len(proxy.streams)
                proxy.reset()
                await until_async(lambda: len(proxy.streams) > before, "joined again", lambda: member.log()[-3000:])
                drain = p.Drain(assign.uid, assign.round, assign.claim, "grow", False, 60.0)
                assert isinstance(await job.call(coordinator, drain), p.Accepted)
                report = await job.until(coordinator, member_is("drained", "failed"), "no stream")
                assert not report.failures, report.failures

                await job.begin(2, coordinator, member)
                await job.until(
                    coordinator, lambda report: report.round == 2 and member_is("running")(report), "no round"
                )
                member.kill()
                report = await job.until(coordinator, lambda report: report.failures)
                (failure,) = report.failures
                assert failure.message == f"{member.name} closed its connection to the coordinator.", (
                    "not for its silence"
                )
            finally:
                proxy.close()

    asyncio.run(body())
