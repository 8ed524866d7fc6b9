"""Where a process stands in its code, asked without its help: it may hang in C, or be stopped.

A worker forked by us has registered faulthandler for SIGNAL, which writes the Python stacks of all threads from the
signal handler itself; any other process, and what it has started, is looked at by py-spy, where that is installed and
permitted. What the kernel knows comes first, and is all there is where neither answers."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import shutil
import signal
from collections.abc import Mapping
from typing import BinaryIO, Optional

from concertina_agent.workers.child_processes import Reaper
from concertina_protocol.heartbeat import VARIABLE
from concertina_protocol.waiting import within

SIGNAL = signal.SIGUSR2
SUFFIX = ".stacks"
ANSWER_SECONDS = 1.0
QUIET_SECONDS = 0.06
"""A dump that does not grow for so long is complete."""
KEEP_LINES, KEEP_CHARACTERS = 40, 240
FAMILY = 8
"""Processes of one worker that are looked at."""
FRAMES = 8
"""Kept of each thread, innermost first."""
IDLE = ("<no Python frame>", "concurrent/futures/thread.py")
"""In the innermost frame of a thread that tells nothing: a library's own, or a pool's that has nothing to do."""


def register(environment: Mapping[str, str]) -> None:
    """In a worker: from now on SIGNAL writes the stacks of all threads into the file beside the heartbeat."""
    if path := environment.get(VARIABLE):
        with contextlib.suppress(OSError):
            faulthandler.register(SIGNAL, open(path + SUFFIX, "w"), all_threads=True)  # noqa: SIM115


async def collect(pid: int, heartbeat: str, reaper: Reaper) -> list[str]:
    """All lines: what the kernel says, then the stacks, innermost frame first."""
    if _size(heartbeat + SUFFIX) >= 0:
        return [_kernel(pid), *await _by_signal(pid, heartbeat + SUFFIX)]
    family = _family(pid)
    found = await asyncio.gather(*(_from_outside(each, reaper) for each in family))
    return [line for each, lines in zip(family, found) for line in (_kernel(each), *lines)]


def bounded(lines: list[str]) -> tuple[str, ...]:
    """The innermost frames of each thread at work, within what a message may hold. The thread that answered, the main
    one, comes last in a dump and first here."""
    threads: list[list[str]] = [[]]
    for line in lines:
        if line.startswith(("Current thread", "Thread ")):
            threads.append([])
        if line.strip() and len(threads[-1]) <= FRAMES:
            threads[-1].append(line[:KEEP_CHARACTERS])
    head, *rest = threads
    rest = [thread for thread in rest if not (len(thread) > 1 and any(name in thread[1] for name in IDLE))]
    rest.sort(key=lambda thread: not (thread[0].startswith("Current thread") or "MainThread" in thread[0]))
    return tuple(line for thread in (head, *rest) for line in thread)[:KEEP_LINES]


def stopped(pid: int) -> Optional[int]:
    """The CPU time it has used, in clock ticks, if it is stopped (not by a debugger); proc_pid_stat(5)."""
    state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    return int(fields[10]) + int(fields[11]) if state == "T" else None


def _family(pid: int) -> list[int]:
    """The process and what it has started, as a command of one's own may be a shell that runs the script."""
    found = [pid]
    for each in found:
        found += map(int, _read(f"/proc/{each}/task/{each}/children").split())
    return found[:FAMILY]


def _kernel(pid: int) -> str:
    fields = dict(line.split(":", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":" in line)
    waits = _read(f"/proc/{pid}/wchan").strip("0")
    name, state, threads = (fields.get(field, "?").strip() for field in ("Name", "State", "Threads"))
    state_line = f"process {pid} ({name}): state {state}, {threads} threads" if fields else f"process {pid}: gone"
    return f"{state_line}, waits in the kernel's {waits}" if waits else state_line


async def _by_signal(pid: int, path: str) -> list[str]:
    start = _size(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
    clock = asyncio.get_running_loop().time
    give_up, size, grew = clock() + ANSWER_SECONDS, start, 0.0
    while clock() < give_up and (size == start or clock() < grew + QUIET_SECONDS):
        await asyncio.sleep(0.02)
        if (grown := _size(path)) != size:
            size, grew = grown, clock()
    if size == start:
        return ["it does not answer the signal for its stacks"]
    return _read(path)[start:].splitlines()


async def _from_outside(pid: int, reaper: Reaper) -> list[str]:
    program = shutil.which("py-spy")
    lines, known = await _by_py_spy(program, pid, reaper) if program else ([], False)
    if not known:
        lines += [f"kernel: {line}" for line in _read(f"/proc/{pid}/stack").splitlines()]
    return lines


async def _by_py_spy(program: str, pid: int, reaper: Reaper) -> tuple[list[str], bool]:
    """What it says, and whether that is a stack: it can't tell of other programs, nor where it may not look."""
    child, output = _start_py_spy(program, pid)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reaper.watch(child, lambda code: None if ended.done() else ended.set_result(code))
    with output:
        try:
            code = await within(ANSWER_SECONDS, ended)
        except asyncio.TimeoutError:
            os.kill(child, signal.SIGKILL)
            return ["py-spy does not answer"], False
        lines = output.read(1 << 16).decode(errors="replace").splitlines()
    return (lines, True) if code == 0 else ([f"py-spy: {line}" for line in lines[:1]], False)


def _start_py_spy(program: str, pid: int) -> tuple[int, BinaryIO]:
    """Its pid, and what it prints (a pipe holds all of it)."""
    read, write = os.pipe()
    try:
        redirect = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_DUP2, write, 2)]
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        return os.posix_spawn(program, command, os.environ, file_actions=redirect), open(read, "rb", buffering=0)
    finally:
        os.close(write)


def _size(path: str) -> int:
    """-1 where there is no such file."""
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
