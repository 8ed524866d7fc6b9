"""Processes of workers: their start, their end and their output.

A worker is forked from a warm process that has already imported the worker's modules, or is started as an ordinary
process.
"""

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
"""Path from which `concertina_agent` is imported, which is a folder or the zipapp."""
PRELOAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment variables that only the parent process has, and not the workers that are forked from it.

The variables limit the parent to one thread, because a process with several threads must not fork. They also make
checks for GPUs work without opening a GPU.
"""
AGAIN_SECONDS = (1.0, 3.0, 10.0)
"""Seconds before each further attempt to start a parent process in place of one that died during its imports.

The cause of the death, such as a lack of memory, may disappear after a while.
"""


class Child:
    """Process that the agent has started. The future `ended` gets the exit code as soon as the process is reaped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


class Process(Child):
    """Child process that leads its own process group."""

    def __init__(self, pid: int, lines: output.Tail) -> None:
        super().__init__(pid)
        self.lines = lines
        self.scripts: list[Child] = []
        """Forks of warm processes that run scripts which this process's Python interpreters have handed over."""
        self.taking_over: set[asyncio.Future[Any]] = set()
        """Unanswered requests for forks that take over scripts of this process."""
        self.killed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of this process, and of the running forks of warm processes that run its scripts."""
        return (self.pid, *(script.pid for script in self.scripts if not script.ended.done()))

    def send_signal(self, number: int) -> None:
        """Send a signal to the whole process group, unless the process has been reaped.

        SIGKILL is also sent to the forks that run the scripts of this process (`scripts`), because they may still run
        after this process has ended.
        """
        if not self.ended.done():
            kill_group(self.pid, number)
        if number == signal.SIGKILL:
            self.killed = True
            for pid in self.pids if not self.ended.done() else self.pids[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    async def gone(self) -> None:
        """Wait until the process has been reaped, and also the forks that run its scripts (`scripts`)."""
        await self.ended
        while self.taking_over:
            await asyncio.wait(self.taking_over)
        for script in self.scripts:
            await script.ended

    async def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of output after the process has ended.

        If a child of the process keeps the output open, this method does not wait for it.
        """
        await self.lines.closed(0.2)
        return self.lines.last()


@dataclasses.dataclass(frozen=True)
class ForkTarget:
    """Function "module:function" that a fork has to run, and the arguments of the function.

    The file descriptors `fds` are passed to the fork. In the arguments, "fd:0" stands for the first of them.
    """

    run: str
    arguments: tuple[str, ...] = ()
    fds: tuple[int, ...] = ()


class StartError(RuntimeError):
    """Error that a process could not be started. The text is a sentence."""


def start_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    reaper: Reaper,
    prefix: str = "",
    fds: tuple[int, ...] = (),
    directory: Optional[str] = None,
) -> Process:
    """Start an ordinary process in a process group of its own.

    The process stays in the agent's session, so that a fork of a warm parent can join its group (decision "Warm starts
    of commands with shells and wrappers"). `directory` is the process's working directory, or None for the agent's
    working directory.

    Raises:
        StartError: If the process cannot be started.
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
    """Answer of a warm process that it can't fork a worker now."""

    why: str
    changed: str = ""
    """Path of a file that has changed since the parent process imported it, or "".

    If a file has changed, a new parent process has to be started, and can then fork.
    """


def _refusal(answer: Mapping[str, Any]) -> ForkRefused:
    changed = answer.get("stale", "")
    return ForkRefused(f"{changed} has changed" if changed else answer.get("unfit", ""), changed)


class WorkerParent:
    """Warm process: it has imported the workers' modules, and forks workers when the agent requests it."""

    def __init__(self, imports: str, reaper: Reaper) -> None:
        """Prepare a warm process without starting it. `imports` describes the modules that it will import."""
        self._imports, self._reaper = imports, reaper
        self._children: dict[int, Child] = {}
        self._answers: collections.deque[asyncio.Future[Mapping[str, Any]]] = collections.deque()
        self._early: dict[int, int] = {}
        self.warm: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future whose result is "" when the parent is ready to fork, or the reason why it never will be."""
        self._control: Optional[socket.socket] = None
        self._process: Optional[Process] = None
        self._oom_kills = 0
        """Number of OOM kills in this container before the parent was started."""
        self.ending = False
        """True if the parent is expected to exit."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def idle(self) -> bool:
        """True if no worker that was forked from this process is running."""
        return not self._children and not self._answers

    def begin(
        self, command: Callable[[int], tuple[Sequence[str], Mapping[str, str]]], directory: Optional[str] = None
    ) -> None:
        """Start the warm process.

        `command` returns the command line and the environment variables, given the file descriptor of the process's
        socket. `directory` is the working directory. If it is None, the agent's working directory is used.

        Raises:
            StartError: If the warm process cannot be started.
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
        """Request a fork, and return the new process or the refusal.

        Raises StartError if the warm process has exited or does not answer.
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
        """Request a fork that takes over the script of a Python interpreter. Return the new process or the refusal.

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
        elif control is not self._control:  # the parent died right after its answer, and both were read at once
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
        """Record that this warm process can fork workers, or that it never will.

        `error` is the reason why it never will, or "" if it can.
        """
        if not self.warm.done():
            self.warm.set_result(error)

    def _on_loss(self) -> None:
        """React to the death of a warm process that was ready to fork.

        This implementation does nothing; subclasses override it.
        """

    def _lost(self, control: socket.socket) -> None:
        """React to the death of the warm process.

        The workers that were forked from the warm process die too: the kernel kills them by their parent-death signal.
        This method records the end of these workers, because nothing else reports it.
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
            why = OUT_OF_MEMORY if oom_kills() > self._oom_kills else "see its output"
            self._settle(f"The process that imports {self._imports} died: {why}.")
        elif not self.warm.result():
            self._on_loss()


class ForkParent(WorkerParent):
    """Warm process from which the bundled trainer's workers are forked. If it dies, a new one is started."""

    def __init__(self, preload: str, environment: Mapping[str, str], reaper: Reaper) -> None:
        super().__init__(preload, reaper)
        self._preload, self._environment = preload, environment
        self.given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future that completes with the reason if a parent process that died could not be replaced."""
        self._pauses: Optional[Iterator[float]] = None
        """Seconds to wait before each further start, or None if the parent process has never been ready to fork.

        A parent process that has never been ready to fork is not started again.
        """
        self._next: Optional[asyncio.TimerHandle] = None

    def start(self) -> None:
        """Start the warm process.

        Raises StartError if it cannot be started.
        """
        self.begin(self._command)

    def _command(self, control: int) -> tuple[Sequence[str], Mapping[str, str]]:
        environment = {**self._environment, **PRELOAD_ENVIRONMENT, **_search_path(self._environment)}
        command = [sys.executable, "-m", "concertina_agent.workers.forkserver", "--parent", str(os.getpid())]
        return [*command, "--control", str(control), "--preload", self._preload], environment

    async def run(self, target: ForkTarget, environment: Mapping[str, str], prefix: str = "") -> Process:
        """Start a process as a fork of the warm process.

        If the warm process can't fork, start an ordinary process instead.

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
            return  # the parent has exited after it reported its error
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
