"""The agent's socket, to which Python interpreters of workers' commands connect to hand over their scripts.

The interpreters use the module `hand_over`. Only the job's user may open the socket (mode 0600), and the kernel
identifies the process that has connected. If another process runs an interpreter's script, the interpreter keeps its
connection open and acts as that process: it forwards signals, and ends in the same way. If the interpreter closes the
connection, the agent ends the script. When the script ends, the agent sends the script's exit code on the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Optional, Union

from concertina_agent.workers.hand_over import MAX_PACKET, MOST_FILES
from concertina_agent.workers.workers import Child, Process
from concertina_protocol.log import log_event

MOST_PATH = 100
"""Maximum length of the path of a Unix socket (sun_path has 108 bytes)."""


@dataclasses.dataclass
class Start:
    """One start of a worker's command, with the Python interpreters that the command has started."""

    process: Process
    record: bool
    """True if imports are recorded. Only one worker of a replica records them, because all workers run the same
    script."""
    started_at: float
    """Time of the start, by the event loop's clock."""
    reports: int = 0
    """Number of the command's Python interpreters that have connected and described themselves."""
    recorded: set[str] = dataclasses.field(default_factory=set)
    """Keys of the programs whose imports are recorded by an interpreter of this start."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """Answer to a Python interpreter of a worker's command: the interpreter must run its script itself."""

    record: str = ""
    """File into which the interpreter records imports, or ""."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """Answer to a Python interpreter of a worker's command: another process runs the interpreter's script.

    The other process was forked from a process that has already imported the script's modules.
    """

    child: Child
    refused: Callable[[str], None]
    """Function that is called with the reason if the other process can't take over the script."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Python interpreter of a worker's command that has connected to the agent and described itself."""

    start: Start
    report: Mapping[str, Any]
    fds: tuple[int, ...]
    """File descriptors of the interpreter's socket and of the files that it has inherited."""


class HandOvers:
    """The agent's socket to which Python interpreters of workers' commands connect."""

    def __init__(self, path: str, decide: Callable[[Interpreter], Awaitable[Union[Plain, Taken]]]) -> None:
        """Prepare the socket for Python interpreters. `decide` returns where an interpreter's script runs."""
        self.path, self._decide = path, decide
        self._listening: Optional[socket.socket] = None
        self._starts: dict[int, Start] = {}
        self._number = 0
        self._serving: set[asyncio.Task[None]] = set()

    def begin(self) -> str:
        """Begin to listen on the socket. Return "", or the reason why that is impossible."""
        if len(os.fsencode(self.path)) > MOST_PATH:
            return f"the path {self.path} is too long for a socket"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listening.bind(self.path)
            os.chmod(self.path, 0o600)
            listening.listen(64)
            listening.setblocking(False)
        except OSError as error:
            return f"{self.path} can't be created: {error.strerror}"
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)
        return ""

    @property
    def closed(self) -> bool:
        return self._listening is None

    @property
    def silent_since(self) -> float:
        """Start time of the oldest command that has started no Python interpreter yet, or infinity.

        An interpreter that starts connects to this socket. If no interpreter connects for a while, the command cannot
        have a warm start.
        """
        return min((start.started_at for start in self._starts.values() if not start.reports), default=float("inf"))

    def close(self) -> None:
        for task in self._serving:
            task.cancel()
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def next_value(self) -> str:
        """Return the value of the environment variable that identifies the next start of a command.

        The command's Python interpreters send this value, so that the agent knows to which worker each interpreter
        belongs.
        """
        self._number += 1
        return f"{self._number}:{self.path}"

    def add(self, process: Process, record: bool) -> Start:
        """Record that a worker's command was started with the environment variable `next_value`, and return the record.

        Until `process` ends, the agent answers the Python interpreters that the command starts.
        """
        number, now = self._number, asyncio.get_running_loop().time()
        start = self._starts[number] = Start(process, record, now)
        process.ended.add_done_callback(lambda _: self._starts.pop(number, None))
        return start

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
            report = {**json.loads(data), "pid": _peer(interpreter)}
            start = self._starts[report["start"]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            log_event("hand_over_failed", error=f"{type(error).__name__}: {error}")
            interpreter.close()
            _close(files)
            return
        start.reports += 1
        described = Interpreter(start, report, (interpreter.fileno(), *files))
        task = asyncio.ensure_future(self._serve(interpreter, described))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: interpreter.close())

    async def _serve(self, connection: socket.socket, interpreter: Interpreter) -> None:
        answer: Union[Plain, Taken]
        try:
            answer = await self._decide(interpreter)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # any process of the user can send this
            log_event("hand_over_failed", error=f"{type(error).__name__}: {error}")
            answer = Plain()
        finally:
            _close(interpreter.fds[1:])
        if isinstance(answer, Plain):
            _send(connection, {"record": answer.record})
            return
        child = answer.child
        asyncio.get_running_loop().add_reader(connection, _on_packet, connection, answer)
        try:
            code = await asyncio.shield(child.ended)
        finally:
            asyncio.get_running_loop().remove_reader(connection)
        _send(connection, {"code": code})


def _on_packet(connection: socket.socket, taken: Taken) -> None:
    """Receive a packet from an interpreter whose script runs in a fork.

    A packet reports that the fork has refused to take over the script. An empty packet means that the interpreter was
    killed.
    """
    try:
        data = connection.recv(MAX_PACKET)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if data:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            taken.refused(str(json.loads(data)["plain"]))
        return
    asyncio.get_running_loop().remove_reader(connection)
    if not taken.child.ended.done():
        with contextlib.suppress(ProcessLookupError):
            os.kill(taken.child.pid, signal.SIGKILL)


def _peer(connection: socket.socket) -> int:
    """Return the id of the process at the other end of a connection.

    Raises:
        LookupError: If the process is in another pid namespace.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", data)[0]
    if pid == 0:
        raise LookupError("the interpreter is in another pid namespace")
    return pid


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
