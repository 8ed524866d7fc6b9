"""Start, communication and end of worker processes: forks of the warm parent, or plain commands."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

from concertina_agent.workers import output
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.family import die_with_parent, kill_group
from concertina_agent.workers.forkserver import MAX_PACKET
from concertina_agent.workers.worker_memory import oom_kills
from concertina_protocol import descriptors
from concertina_protocol.log import log_event
from concertina_protocol.messages.reports import OUT_OF_MEMORY

SEARCH_PATH = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Path from which `concertina_agent` is imported: a folder or the zipapp."""
PRELOAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Variables of the parent only: with one thread it can be forked, and checking for GPUs must not open them."""
AGAIN_SECONDS = (1.0, 3.0, 10.0)
"""Pauses before further starts of a parent that replaces a warm one, if the previous start died during its imports.

The cause, such as lack of memory, may disappear.
"""


class Child:
    """Process; `ended` has its exit code as soon as it is reaped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


class Process(Child):
    """Process that was started in a process group of its own."""

    def __init__(self, pid: int, lines: output.Tail) -> None:
        super().__init__(pid)
        self.lines = lines
        self.scripts: list[Child] = []
        """Processes that have taken over interpreters of this process's group, and are children of a warm parent."""
        self.taking_over: set[asyncio.Future[Any]] = set()
        """Requests for such processes that are not answered yet."""
        self.killed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of this process and of the running scripts that have taken over its interpreters."""
        return (self.pid, *(script.pid for script in self.scripts if not script.ended.done()))

    def send_signal(self, number: int) -> None:
        """Send a signal to the whole process group, unless the process has been reaped.

        SIGKILL also ends the scripts, which the command may have left in the background.
        """
        if not self.ended.done():
            kill_group(self.pid, number)
        if number == signal.SIGKILL:
            self.killed = True
            for pid in self.pids if not self.ended.done() else self.pids[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    async def gone(self) -> None:
        """Wait until the process and all scripts have been reaped."""
        await self.ended
        while self.taking_over:
            await asyncio.wait(self.taking_over)
        for script in self.scripts:
            await script.ended

    async def last_lines(self) -> tuple[str, ...]:
        """Return the last lines after the process has ended. Output that a grandchild keeps open is not waited for."""
        await self.lines.closed(0.2)
        return self.lines.last()


@dataclasses.dataclass(frozen=True)
class ForkTarget:
    """Function to run in a fork: "module:function" with arguments; `fds` are passed on ("fd:0" names the first)."""

    run: str
    arguments: tuple[str, ...] = ()
    fds: tuple[int, ...] = ()


class StartError(RuntimeError):
    """Error for a process that could not be started; its text is a sentence."""


def start_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    reaper: Reaper,
    prefix: str = "",
    fds: tuple[int, ...] = (),
    directory: Optional[str] = None,
) -> Process:
    """Start a plain process in a process group of its own.

    Its session is the agent's, so that a fork of a warm parent can join the group (decision "An interpreter hands
    itself over"). `directory` is its working directory, or None for the agent's.

    Raises:
        StartError: If it cannot be started.
    """
    parent = os.getpid()

    def become_child() -> None:
        os.setpgid(0, 0)
        die_with_parent(parent)
        descriptors.as_given()

    with output.pipes() as (out, err, tail):
        try:
            child = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=fds,
                preexec_fn=become_child, cwd=directory,
            )  # fmt: skip
        except OSError as error:
            raise StartError(f"The command {command[0]!r} can't be started: {error.strerror}.") from error
        tail.start(prefix)
    process = Process(child.pid, tail)

    def end(code: int) -> None:
        child.returncode = code
        process.end(code)

    reaper.watch(child.pid, end)
    return process


@dataclasses.dataclass(frozen=True)
class ForkRefused:
    """Result of a request for which nothing was forked."""

    why: str
    changed: str = ""
    """File that has changed since it was imported, or empty. Another parent could fork."""


def _refusal(answer: Mapping[str, Any]) -> ForkRefused:
    changed = answer.get("stale", "")
    return ForkRefused(f"{changed} has changed" if changed else answer.get("unfit", ""), changed)


class WorkerParent:
    """Process that forks others, as the agent sees it."""

    def __init__(self, imports: str, reaper: Reaper) -> None:
        """Initialize without starting the process; `imports` says in words what it imports."""
        self._imports, self._reaper = imports, reaper
        self._children: dict[int, Child] = {}
        self._answers: collections.deque[asyncio.Future[Mapping[str, Any]]] = collections.deque()
        self._early: dict[int, int] = {}
        self.warm: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future whose result is empty once the parent is warm, or the reason why nothing can ever be forked."""
        self._control: Optional[socket.socket] = None
        self._process: Optional[Process] = None
        self._oom_kills = 0
        """Number of OOM kills in this container before the parent started."""
        self.ending = False
        """Whether the end of the parent is expected."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def idle(self) -> bool:
        """Whether no process that it has forked is running."""
        return not self._children and not self._answers

    def begin(
        self, command: Callable[[int], tuple[Sequence[str], Mapping[str, str]]], directory: Optional[str] = None
    ) -> None:
        """Start the parent.

        `command` returns the command line and environment, given the file descriptor of its socket. `directory` is its
        working directory, or None for the agent's.

        Raises:
            StartError: If it cannot be started.
        """
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_end.setblocking(False)
        line, environment = command(child_end.fileno())
        self._oom_kills = oom_kills()
        try:
            fds = (child_end.fileno(),)
            self._process = start_command(line, environment, self._reaper, fds=fds, directory=directory)
        except StartError:
            own_end.close()
            raise
        finally:
            child_end.close()
        self._control = own_end
        asyncio.get_running_loop().add_reader(own_end, self._read, own_end)

    async def fork(
        self, request: Mapping[str, Any], fds: tuple[int, ...] = (), prefix: str = ""
    ) -> Union[Process, ForkRefused]:
        """Return the process that is forked for a request, or the refusal.

        Raises StartError if the parent is gone or does not answer.
        """
        control = self._control
        with output.pipes() as (out, err, tail):
            answer = await self._ask(request, (out, err, *fds))
            if "pid" in answer:
                tail.start(prefix)
                process = Process(answer["pid"], tail)
                self._adopt(process, control)
                return process
        return _refusal(answer)

    async def fork_for_interpreter(self, request: Mapping[str, Any], fds: tuple[int, ...]) -> Union[Child, ForkRefused]:
        """Return the process that is forked to take over an interpreter, or the refusal.

        Raises:
            StartError: If the parent is gone or does not answer.
        """
        control = self._control
        answer = await self._ask(request, fds)
        if "pid" not in answer:
            return _refusal(answer)
        child = Child(answer["pid"])
        self._adopt(child, control)
        return child

    def stop(self) -> None:
        self.ending = True
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    async def _ask(self, request: Mapping[str, Any], fds: Sequence[int]) -> Mapping[str, Any]:
        data = json.dumps(request).encode()
        control = self._control
        if control is None:
            raise StartError("The warm parent is gone.")
        if len(data) > MAX_PACKET:
            raise StartError(f"The environment of a worker is too large ({len(data)} bytes).")
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        try:
            socket.send_fds(control, [data], list(fds))
        except OSError as error:
            self._answers.remove(answer)
            raise StartError(f"The warm parent does not answer: {error}.") from error
        return await answer

    def _adopt(self, process: Child, control: Optional[socket.socket]) -> None:
        if process.pid in self._early:
            process.end(self._early.pop(process.pid))
        elif control is not self._control:  # the parent died right after its answer, and both were read together
            kill_group(process.pid)
            process.end(-signal.SIGKILL)
        else:
            self._children[process.pid] = process

    def _read(self, control: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = control.recv(MAX_PACKET)
                except ConnectionError:
                    data = b""
                if not data:
                    return self._lost(control)
                self._on_message(json.loads(data))

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "code" in message:
            child = self._children.pop(message["pid"], None)
            if child is not None:
                child.end(message["code"])
            else:
                self._early[message["pid"]] = message["code"]
        elif "pid" in message or "unfit" in message or "stale" in message:
            self._answers.popleft().set_result(message)
        else:
            self._on_news(message)

    def _on_news(self, message: Mapping[str, Any]) -> None:
        self._settle(message.get("error", ""))

    def _settle(self, error: str) -> None:
        """Set the result of `warm`: empty, or the reason why the parent will never be warm."""
        if not self.warm.done():
            self.warm.set_result(error)

    def _on_loss(self) -> None:
        """Handle the loss of a parent that was warm."""

    def _lost(self, control: socket.socket) -> None:
        """Handle the parent's death.

        Its children die with it (by their parent-death signal), so they are reported dead here.
        """
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        if control is not self._control:
            return
        self._control = None
        if not self.ending:
            log_event("fork_parent_lost", children=sorted(self._children))
        for answer in self._answers:
            answer.set_exception(StartError("The warm parent died."))
        self._answers.clear()
        for child in self._children.values():
            kill_group(child.pid)
            child.end(-signal.SIGKILL)
        self._children.clear()
        if not self.warm.done():
            why = OUT_OF_MEMORY if oom_kills() > self._oom_kills else "its output says why"
            self._settle(f"The process that imports {self._imports} died: {why}.")
        elif not self.warm.result():
            self._on_loss()


class ForkParent(WorkerParent):
    """Parent of the bundled trainer's processes, which is started once, and again when it dies."""

    def __init__(self, preload: str, environment: Mapping[str, str], reaper: Reaper) -> None:
        super().__init__(preload, reaper)
        self._preload, self._environment = preload, environment
        self.given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future with the reason why a warm parent could not be replaced."""
        self._pauses: Optional[Iterator[float]] = None
        """Pauses before further starts, or None for the very first parent, which is not started again."""
        self._next: Optional[asyncio.TimerHandle] = None

    def start(self) -> None:
        """Start the parent.

        Raises StartError if it cannot be started.
        """
        self.begin(self._command)

    def _command(self, control: int) -> tuple[Sequence[str], Mapping[str, str]]:
        environment = {**self._environment, **PRELOAD_ENVIRONMENT, **_search_path(self._environment)}
        command = [sys.executable, "-m", "concertina_agent.workers.forkserver", "--parent", str(os.getpid())]
        return [*command, "--control", str(control), "--preload", self._preload], environment

    async def run(self, target: ForkTarget, environment: Mapping[str, str], prefix: str = "") -> Process:
        """Fork a process, or spawn it if the parent cannot be forked.

        Raises:
            StartError: If the process cannot be started.
        """
        error = await asyncio.shield(self.warm)
        if error:
            raise StartError(error)
        request = {"run": target.run, "arguments": target.arguments, "environment": dict(environment)}
        forked = await self.fork(request, target.fds, prefix)
        if isinstance(forked, Process):
            return forked
        log_event("fork_unfit", why=forked.why)
        arguments = [str(target.fds[int(a[3:])]) if a.startswith("fd:") else a for a in target.arguments]
        command = [sys.executable, "-m", "concertina_agent.workers.forkserver", "--run", target.run, "--", *arguments]
        environment = {**environment, **_search_path(environment)}
        return start_command(command, environment, self._reaper, prefix, target.fds)

    def stop(self) -> None:
        super().stop()
        if self._next is not None:
            self._next.cancel()

    def _on_loss(self) -> None:
        if not self.ending:
            self.warm, self._pauses = asyncio.get_running_loop().create_future(), iter(AGAIN_SECONDS)
            self._follow()

    def _follow(self) -> None:
        self._next = None
        try:
            self.start()
        except StartError as error:
            self._settle(str(error))

    def _settle(self, error: str) -> None:
        if self._next is not None:
            return  # the parent has ended after reporting its error
        if not error or self._pauses is None or self.ending:
            super()._settle(error)
        elif (pause := next(self._pauses, None)) is not None:
            log_event("fork_parent_again", why=error, seconds=pause)
            self._next = asyncio.get_running_loop().call_later(pause, self._follow)
        else:
            super()._settle(error)
            self.given_up.set_result(error)


def _search_path(environment: Mapping[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (SEARCH_PATH, environment.get("PYTHONPATH", ""))))}
