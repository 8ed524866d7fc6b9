"""Relations between a process, its parent and its children.

The module imports as little as possible, because workers wait for the start of a process that imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4
"""Flag of an exiting process, from include/linux/sched.h."""


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGKILL to this process when its parent `parent` (a process id) has ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants: it becomes the parent of their orphans.

    See decision "The agent is a child subreaper".
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads.

    If process `pid` does not lead a group, or not yet, send the signal only to this process.
    """
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ends(pid: int) -> bool:
    """Return whether a process runs no more user code, because it is gone or all its threads have begun to exit.

    The parent can reap such a process only later, after the kernel has freed the process's memory in the machine and on
    GPUs. See proc_pid_stat(5), flags.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{pid}/task/{task}/stat") as file,
            ):
                if not int(file.read().rpartition(")")[2].split()[6]) & PF_EXITING:
                    return False
    return True


def exit_code(status: int) -> int:
    """Return the exit code for a wait status as in `subprocess`: negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
