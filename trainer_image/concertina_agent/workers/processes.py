"""Child processes of a single-threaded agent: their ends, their orphans, and that none outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Optional

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as its parent (`parent`, its pid) is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """To the process group of a session leader, or to itself alone where it has not made its session yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def exit_code(status: int) -> int:
    """As in `subprocess`: negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


class Reaper:
    """Reaps every child, and every orphan of its children: an agent is process 1 of its container, or acts like it
    (decision "The agent is a child subreaper")."""

    def __init__(self) -> None:
        self._ends: dict[int, Callable[[int], None]] = {}

    def start(self) -> None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """`on_exit(code)` is called once, from the event loop, when this child has ended. Call it before the loop runs
        again after the fork."""
        self._ends[pid] = on_exit

    def strays(self) -> list[int]:
        """Children that nobody watches: what our processes left behind."""
        return [pid for pid in _children() if pid not in self._ends]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            on_exit: Optional[Callable[[int], None]] = self._ends.pop(pid, None)
            if on_exit is not None:
                on_exit(exit_code(status))


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
