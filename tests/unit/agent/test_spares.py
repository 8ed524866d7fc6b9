"""The agent's end of a process that waits to become a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from concertina_agent.workers import output, spares
from concertina_agent.workers.workers import Process
from concertina_protocol.waiting import within


def test_a_spare_that_is_late_leaves_no_file_that_the_loop_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing is read from the next file with its number, which may be the channel of a worker."""
    monkeypatch.setattr(spares, "WARM_SECONDS", 0.0)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        asyncio.run(late(child.pid))
        assert child.wait(20) == -signal.SIGKILL


async def late(pid: int) -> None:
    control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = control.fileno()
    spare = spares.Spare("spare", Process(pid, output.Tail({})), control)
    assert await spare.use({}, "", ()) is None
    other_end.close()
    assert await within(20, spare.warm) is False
    await asyncio.sleep(0)
    assert control.fileno() == -1
    reader, writer = socket.socketpair()
    if reader.fileno() != number:
        os.dup2(reader.fileno(), number)
        reader.close()
        reader = socket.socket(fileno=number)
    with reader, writer:
        reader.setblocking(False)
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(reader, 1))
        await asyncio.sleep(0)
        writer.send(b"x")
        assert await within(20, reading) == b"x"
