"""Stacks of a worker that may hang in C code or be stopped, collected without the worker's cooperation.

In a worker that the agent has forked, faulthandler is registered for SIGNAL: the signal makes it write the Python
stacks of all threads. For other workers and for child processes, the agent runs py-spy, if py-spy is installed and has
the permission. The result begins with information of the kernel about the process. If no stacks can be read, the result
has only this information.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Optional

from concertina_agent.workers.child_processes import Reaper
from concertina_protocol.heartbeat import VARIABLE
from concertina_protocol.waiting import within

SIGNAL = signal.SIGUSR2
SUFFIX = ".stacks"
ANSWER_SECONDS = 2.0
"""Seconds to wait for the stacks of a worker, and for its list of collectives.

Processes answer late if the machine is busy.
"""
QUIET_SECONDS = 0.06
"""Seconds without growth of the file after which faulthandler's output counts as complete."""
CURRENT = "Current thread"
"""Beginning of the line before the stack of the thread that handled the signal, which faulthandler writes last."""
KEEP_LINES, KEEP_CHARACTERS = 40, 240
FAMILY = 8
"""Maximum number of processes to inspect for one worker."""
FRAMES = 8
"""Number of frames of each thread to keep, beginning with the innermost."""
IDLE = ("<no Python frame>", "concurrent/futures/thread.py")
"""Texts that occur in the innermost frame of a thread without interest: an idle thread, or one of a library."""


def register(environment: Mapping[str, str]) -> None:
    """Make SIGNAL write the stacks of all threads of this worker into a file beside its heartbeat."""
    if path := environment.get(VARIABLE):
        with contextlib.suppress(OSError):
            faulthandler.register(SIGNAL, open(path + SUFFIX, "w"), all_threads=True)  # noqa: SIM115


async def collect(pids: Sequence[int], heartbeat: str, reaper: Reaper) -> list[str]:
    """Return lines that show where a worker hangs: the state of its threads from /proc, then its Python stacks.

    Args:
        pids: Processes of the worker, without their descendants.
        heartbeat: Path of the worker's heartbeat.
        reaper: Reaper of the agent's child processes.
    """
    if _size(heartbeat + SUFFIX) >= 0:
        return [_kernel(pids[0]), *await _by_signal(pids[0], heartbeat + SUFFIX)]
    family = _family(pids)
    stacks = await asyncio.gather(*(_from_outside(member, reaper) for member in family))
    return [line for member, lines in zip(family, stacks) for line in (_kernel(member), *lines)]


def bounded(lines: list[str]) -> tuple[str, ...]:
    """Return the innermost stack frames of the relevant threads, limited to what fits into a message.

    The main thread, which handles the signal, is the last one in faulthandler's output. It is the first one in the
    result.
    """
    threads: list[list[str]] = [[]]
    for line in lines:
        if line.startswith((CURRENT, "Thread ")):
            threads.append([])
        if line.strip() and len(threads[-1]) <= FRAMES:
            threads[-1].append(line[:KEEP_CHARACTERS])
    head, *rest = threads
    rest = [thread for thread in rest if not (len(thread) > 1 and any(name in thread[1] for name in IDLE))]
    rest.sort(key=lambda thread: not (thread[0].startswith(CURRENT) or "MainThread" in thread[0]))
    return tuple(line for thread in (head, *rest) for line in thread)[:KEEP_LINES]


def stopped(pid: int) -> Optional[int]:
    """Return the CPU time of a process in clock ticks if the process is stopped, otherwise None.

    For a process that a debugger has stopped, the result is None. See proc_pid_stat(5).
    """
    state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    return int(fields[10]) + int(fields[11]) if state == "T" else None


def _family(roots: Sequence[int]) -> list[int]:
    """Return the processes `roots` and their descendants.

    For example, a user's own command may be a shell that runs the script.
    """
    pids = [*roots]
    for parent in pids:
        pids += map(int, _read(f"/proc/{parent}/task/{parent}/children").split())
    return pids[:FAMILY]


def _kernel(pid: int) -> str:
    fields = dict(line.split(":", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":" in line)
    waits = _read(f"/proc/{pid}/wchan").strip("0")
    name, state, threads = (fields.get(field, "?").strip() for field in ("Name", "State", "Threads"))
    state_line = (
        f"process {pid} ({name}): state {state}, {threads} threads" if fields else f"process {pid}: it has ended"
    )
    return f"{state_line}, waits in the kernel's {waits}" if waits else state_line


async def _by_signal(pid: int, path: str) -> list[str]:
    start = _size(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
    clock = asyncio.get_running_loop().time
    give_up, size, grew, has_main = clock() + ANSWER_SECONDS, start, 0.0, False
    while clock() < give_up and (not has_main or clock() < grew + QUIET_SECONDS):
        await asyncio.sleep(0.02)
        if (grown := _size(path)) != size:
            size, grew = grown, clock()
            has_main = CURRENT in _read(path)[start:]
    if size == start:
        return ["it does not respond to the signal for its stacks"]
    return _read(path)[start:].splitlines()


async def _from_outside(pid: int, reaper: Reaper) -> list[str]:
    program = shutil.which("py-spy")
    lines, has_stack = await _by_py_spy(program, pid, reaper) if program else ([], False)
    if not has_stack:
        lines += [f"kernel: {line}" for line in _read(f"/proc/{pid}/stack").splitlines()]
    return lines


async def _by_py_spy(program: str, pid: int, reaper: Reaper) -> tuple[list[str], bool]:
    """Run py-spy on a process, and return its output and whether the output is a stack.

    py-spy supports only Python, and may lack the permission to inspect the process.
    """
    child, output = _start_py_spy(program, pid)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reaper.watch(child, lambda code: None if ended.done() else ended.set_result(code))
    with output:
        try:
            code = await within(ANSWER_SECONDS, ended)
        except asyncio.TimeoutError:
            os.kill(child, signal.SIGKILL)
            return ["py-spy does not respond"], False
        lines = output.read(1 << 16).decode(errors="replace").splitlines()
    return (lines, True) if code == 0 else ([f"py-spy: {line}" for line in lines[:1]], False)


def _start_py_spy(program: str, pid: int) -> tuple[int, BinaryIO]:
    """Start py-spy, and return its process id and a pipe with its output. All of the output fits into the pipe."""
    read, write = os.pipe()
    try:
        redirect = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_DUP2, write, 2)]
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        return os.posix_spawn(program, command, os.environ, file_actions=redirect), open(read, "rb", buffering=0)
    finally:
        os.close(write)


def _size(path: str) -> int:
    """Return the size of the file at `path` in bytes, or -1 if there is no such file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
