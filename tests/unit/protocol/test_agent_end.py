"""Agent's end of a worker's channel, on a real socket."""

import asyncio
import os
import socket

import pytest

from concertina_protocol import MAX_LINE
from concertina_protocol import worker_channel as w
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.worker_channel.agent_end import AgentEnd


def run(body) -> None:
    async def both():
        ours, theirs = socket.socketpair()
        end = AgentEnd(ours)
        try:
            await asyncio.wait_for(body(end, theirs), 30)
        finally:
            end.release()
            theirs.close()

    asyncio.run(both())


def test_last_words_are_heard_though_a_message_crosses_them():
    async def body(end, theirs):
        end.send(w.CopiedUpTo(1))  # never read
        theirs.sendall(w.encode(w.Beat(0, 2, "training")) + w.encode(w.Done("drained", 2)))
        theirs.close()
        end.send(w.CopiedUpTo(2))  # to nobody
        assert await end.receive() == w.Beat(0, 2, "training")
        assert await end.receive() == w.Done("drained", 2)
        assert await end.receive() is None
        end.close()
        end.close()

    run(body)


def test_more_than_the_socket_takes_at_once_arrives_whole():
    header = "x" * 3_000_000

    async def body(end, theirs):
        end.send(w.FetchedHeader(header=header))
        line = b""
        while not line.endswith(b"\n"):
            line += await asyncio.to_thread(theirs.recv, 1 << 16)
        assert w.decode(line) == w.FetchedHeader(header=header)

    run(body)


def test_endless_lines_are_refused_and_the_peer_is_known():
    async def body(end, theirs):
        assert end.peer_pid == os.getpid()
        sending = asyncio.to_thread(theirs.sendall, b"x" * (2 * MAX_LINE + (1 << 20)))
        task = asyncio.ensure_future(sending)
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            await end.receive()
        end.release()
        with pytest.raises(OSError, match=r"[Pp]ipe|reset"):
            await task

    run(body)
