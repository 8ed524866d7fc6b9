"""Process that is forked ahead and becomes a worker, from the agent's side and from its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from builders.programs import SEARCH_PATH
from builders.until import until_async
from concertina_agent.workers import output, standby_process
from concertina_agent.workers.standby_process import StandbyProcess
from concertina_agent.workers.workers import ForkTarget, Process, StartError
from concertina_protocol.worker_channel import ENTERED

TARGET = ForkTarget("said:say")
SAYS = """
import json, os, sys
def say(*fds):
    print(json.dumps([dict(os.environ), [os.read(fd, 9).decode() for fd in fds]]))
"""


def started(control: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a standby process with its end of the socket."""
    code = f"import sys; from concertina_agent.workers.standby import stand_by; sys.exit(stand_by({control}))"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, pass_fds=(control,), env=dict(environment), stdout=subprocess.PIPE)


class Parent:
    """Starts each standby process as an ordinary process."""

    def __init__(self, folder: Path) -> None:
        (folder / "said.py").write_text(SAYS)
        self._path = os.pathsep.join([SEARCH_PATH, str(folder)])
        self.children: list[subprocess.Popen[bytes]] = []
        self.processes: list[Process] = []
        self.error = ""

    async def run(self, target: ForkTarget, environment: Mapping[str, str], prefix: str = "") -> Process:
        if self.error:
            raise StartError(self.error)
        child = started(target.fds[0], {**environment, "PYTHONPATH": self._path})
        self.children.append(child)
        self.processes.append(Process(child.pid, output.Tail({})))
        return self.processes[-1]


@contextlib.contextmanager
def kept(parent: Parent) -> Iterator[StandbyProcess]:
    """Keep standby processes while the block runs."""
    standby = StandbyProcess(parent, {"OF": "a standby process"})  # type: ignore[arg-type]
    keeping = asyncio.ensure_future(standby.keep())
    try:
        yield standby
    finally:
        keeping.cancel()
        for child in parent.children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def play(scenario: object) -> None:
    asyncio.run(scenario)  # type: ignore[arg-type]


async def there(parent: Parent, standby: StandbyProcess, count: int = 1) -> None:
    await until_async(lambda: len(parent.children) == count and standby._waiting is not None, "a standby process")


def test_a_standby_process_runs_the_target_with_its_variables_and_files_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        parent, (ours, theirs) = Parent(tmp_path), os.pipe()
        with kept(parent) as standby:
            await there(parent, standby)
            process = standby.take(ForkTarget(TARGET.run, ("fd:0",), (ours,)), {"RANK": "1", "PATH": "/bin"}, "")
            os.write(theirs, b"something")
            assert process is parent.processes[0]
            said, _ = await asyncio.to_thread(parent.children[0].communicate)
            variables, files = json.loads(said)
            assert parent.children[0].returncode == 0
        assert float(variables.pop(ENTERED)) > 0
        assert variables == {"RANK": "1", "PATH": "/bin"}
        assert files == ["something"]

    play(scenario())


def test_the_next_standby_process_is_forked_after_one_was_taken_or_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_process, "PAUSE_SECONDS", 0.0)

    async def scenario() -> None:
        parent = Parent(tmp_path)
        with kept(parent) as standby:
            assert standby.take(TARGET, {}, "") is None, "none is there yet"
            await there(parent, standby)
            assert standby.take(TARGET, {}, "") is parent.processes[0]
            assert standby.take(TARGET, {}, "") is None, "it was taken"
            await there(parent, standby, 2)
            parent.children[1].kill()
            parent.processes[1].end(-9)
            await there(parent, standby, 3)
            assert standby.take(TARGET, {}, "") is parent.processes[2]

    play(scenario())


def test_one_that_has_just_died_or_cannot_get_its_variables_is_not_used(tmp_path: Path) -> None:
    async def died() -> None:
        parent = Parent(tmp_path)
        with kept(parent) as standby:
            await there(parent, standby)
            parent.children[0].kill()
            parent.children[0].wait()
            assert standby.take(TARGET, {}, "") is None

    async def too_large() -> None:
        parent = Parent(tmp_path)
        with kept(parent) as standby:
            await there(parent, standby)
            assert standby.take(TARGET, {"LARGE": "x" * (1 << 24)}, "") is None
            await asyncio.to_thread(parent.children[0].wait, 20)
            assert parent.children[0].returncode in (0, -signal.SIGKILL)

    play(died())
    play(too_large())


def test_an_error_of_a_fork_is_not_the_end_of_standby_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_process, "PAUSE_SECONDS", 0.0)

    async def scenario() -> None:
        parent = Parent(tmp_path)
        parent.error = "no fork"
        with kept(parent) as standby:
            for _ in range(5):
                await asyncio.sleep(0)
            assert standby.take(TARGET, {}, "") is None
            parent.error = ""
            await there(parent, standby)

    play(scenario())


def test_one_that_has_ended_is_not_used_and_its_socket_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def taken() -> None:
        parent = Parent(tmp_path)
        with kept(parent) as standby:
            await there(parent, standby)
            waiting = standby._waiting
            assert waiting is not None
            parent.processes[0].end(-9)
            assert standby.take(TARGET, {}, "") is None
            assert waiting.control.fileno() == -1

    async def replaced() -> None:
        monkeypatch.setattr(standby_process, "PAUSE_SECONDS", 0.0)
        parent = Parent(tmp_path)
        with kept(parent) as standby:
            await there(parent, standby)
            first = standby._waiting
            assert first is not None
            parent.processes[0].end(-9)
            await until_async(lambda: standby._waiting not in (None, first), "the next one")
            assert first.control.fileno() == -1

    play(taken())
    play(replaced())


def test_a_standby_process_that_is_not_needed_ends() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with started(theirs.fileno(), {"PYTHONPATH": SEARCH_PATH}) as child:
        theirs.close()
        ours.close()
        assert child.wait(60) == 0
