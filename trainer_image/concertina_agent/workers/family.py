"""Relations of a process to its parent and its children.

The module imports as little as possible, because each start of a script's parent waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4
"""Flag of include/linux/sched.h."""


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGKILL to this process as soon as its parent, with this pid, is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants (decision "The agent is a child subreaper")."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group of its leader, or to the process alone if it leads none (yet)."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ends(pid: int) -> bool:
    """Return whether the process is gone, or each of its threads has begun to exit, so that it runs no more user code.

    The process is reaped later, when its memory, and a GPU's, has been freed. See proc_pid_stat(5), flags.
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
    """Return the exit code as in `subprocess`: negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
