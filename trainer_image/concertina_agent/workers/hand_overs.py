"""Agent's end of hand-overs: interpreters of workers' commands report here, and are passed to their warm side.

Only a process that belongs to a worker is answered: the socket is the user's own, and the kernel names the process that
has connected, whose session has to be one of a worker (decision "An interpreter hands itself over").
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from concertina_agent.workers.hand_over import MAX_PACKET, MOST_FILES
from concertina_agent.workers.workers import Process, StartError
from concertina_protocol.log import log_event

MOST_PATH = 100
"""Maximum length of the path of a Unix socket (sun_path has 108 bytes)."""


@dataclasses.dataclass
class Start:
    """One start of a worker's command."""

    session: int
    record: bool
    """Whether the script's imports are recorded."""
    host: Optional[socket.socket] = None
    """Socket of the fork that launches the command, or None if the agent has started it."""
    adopted: int = 0
    """Process id of the interpreter whose program was adopted in this start, or 0."""
    reports: int = 0


class HandOvers:
    """Socket at which interpreters report, and the starts to which they belong."""

    def __init__(
        self,
        path: str,
        decide: Callable[[Start, dict[str, Any]], Mapping[str, Any]],
        refused: Callable[[str], None],
    ) -> None:
        """Initialize without a socket.

        `decide` returns the answer to an interpreter's report, or an empty mapping if the start's host takes it over.
        `refused` gets the reason if the host cannot.
        """
        self.path, self._decide, self._refused = path, decide, refused
        self._listening: Optional[socket.socket] = None
        self._starts: dict[int, Start] = {}

    def begin(self) -> None:
        """Listen.

        Raises:
            OSError: If the socket cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(self.path)
        os.chmod(self.path, 0o600)
        listening.listen(64)
        listening.setblocking(False)
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    @property
    def closed(self) -> bool:
        return self._listening is None

    def close(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def add(self, start: Start, process: Process) -> None:
        """Answer the interpreters of a start until its process has ended."""
        self._starts[start.session] = start
        process.ended.add_done_callback(lambda _: self._remove(start))

    def _remove(self, start: Start) -> None:
        self._starts.pop(start.session, None)
        if start.host is not None:
            asyncio.get_running_loop().remove_reader(start.host)
            start.host.close()

    def watch(self, host: socket.socket) -> None:
        """Listen to a host that has launched its command."""
        asyncio.get_running_loop().add_reader(host, self._hear, host)

    def _hear(self, host: socket.socket) -> None:
        try:
            data = host.recv(MAX_PACKET)
        except OSError:
            data = b""
        if data:
            self._refused(json.loads(data)["plain"])
        else:
            asyncio.get_running_loop().remove_reader(host)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            interpreter, _ = listening.accept()
            interpreter.setblocking(False)
            asyncio.get_running_loop().add_reader(interpreter, self._read, interpreter)

    def _read(self, interpreter: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(interpreter)
        files: Sequence[int] = ()
        try:
            data, files, _, _ = socket.recv_fds(interpreter, MAX_PACKET, MOST_FILES)
            start, pid = self._start_of(interpreter)
            report = {**json.loads(data), "pid": pid}
            self._answer(start, report, interpreter, files)
        except (OSError, ValueError, LookupError, TypeError) as error:
            log_event("hand_over_failed", error=f"{type(error).__name__}: {error}")
        finally:
            for file in files:
                os.close(file)
            interpreter.close()

    def _start_of(self, interpreter: socket.socket) -> tuple[Start, int]:
        """Return the start to which a connected process belongs, and its process id.

        Raises:
            LookupError: If it belongs to none.
        """
        data = interpreter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", data)
        session = os.getsid(pid)
        if session not in self._starts:
            raise LookupError(f"process {pid} belongs to no worker")
        return self._starts[session], pid

    def _answer(self, start: Start, report: dict[str, Any], interpreter: socket.socket, files: Sequence[int]) -> None:
        start.reports += 1
        answer = self._decide(start, report)
        if not answer and start.host is not None:
            message = json.dumps({**report, "record": start.record}).encode()
            try:
                socket.send_fds(start.host, [message], [interpreter.fileno(), *files])
                return
            except OSError as error:
                answer = {"record": "", "why": str(error)}
        interpreter.send(json.dumps(answer).encode())


async def launched(host: socket.socket, line: Sequence[str], environment: Mapping[str, str]) -> int:
    """Let a fork of the parent launch a command, and return the command's process id.

    Raises:
        StartError: If it cannot be launched.
    """
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(host, json.dumps({"launch": list(line), "environment": dict(environment)}).encode())
        data = await loop.sock_recv(host, MAX_PACKET)
    except OSError as error:
        raise StartError(f"The process that launches the command has ended: {error}.") from error
    answer = json.loads(data or b"{}")
    if "launched" not in answer:
        why = answer.get("error", "the process that launches it has ended")
        raise StartError(f"The command {line[0]!r} can't be started: {why}.")
    return int(answer["launched"])
