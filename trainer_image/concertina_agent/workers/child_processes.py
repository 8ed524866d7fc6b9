"""Child processes of the agent, and their orphans.

The agent reaps its children and their orphans. All of them end when the agent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Optional, Union

from concertina_agent.workers.family import adopt_orphans, exit_code

MOST_ANCESTORS = 100


class Reaper:
    """Reaper of the agent's child processes and their orphans.

    The kernel makes the agent the parent of these orphans, because the agent is process 1 of its container or a
    subreaper (decision "The agent is a child subreaper").
    """

    def __init__(self) -> None:
        self._ends: dict[int, Callable[[int], None]] = {}

    def start(self) -> None:
        adopt_orphans()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit(code)` once, from the event loop, when the child process `pid` has ended.

        Call this method before the loop runs again after the fork.
        """
        self._ends[pid] = on_exit

    def strays(self) -> list[int]:
        """Return the child processes for which `watch` was not called.

        These processes are orphans. Their parent was a process of this agent, and has ended.
        """
        return [pid for pid in children() if pid not in self._ends]

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


def ancestors(pid: int, proc: str = "/proc") -> list[int]:
    """Return the parent of a process, the parent's parent and so on, as far as /proc shows them."""
    pids: list[int] = []
    with contextlib.suppress(OSError, IndexError, ValueError):
        while pid > 1 and len(pids) < MOST_ANCESTORS:
            with open(f"{proc}/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
            pids.append(pid)
    return pids


def children(pid: Union[int, str] = "self", proc: str = "/proc") -> list[int]:
    """Return the children of a process, or none if it has ended."""
    pids: list[int] = []
    tasks: list[str] = []
    with contextlib.suppress(OSError):
        tasks = os.listdir(f"{proc}/{pid}/task")
    for task in tasks:
        with contextlib.suppress(OSError), open(f"{proc}/{pid}/task/{task}/children") as file:
            pids += [int(child) for child in file.read().split()]
    return pids
