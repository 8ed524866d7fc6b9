"""Process that gets little processor time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from builders.until import until

CPU = Path("/sys/fs/cgroup/cpu")
"""Folder of cgroup v1's controller, if root may create groups in it."""
PERIOD = 0.1
"""Period in seconds, which is the kernel's."""


@contextlib.contextmanager
def throttled(pid: int, share: float) -> Iterator[None]:
    """Limit a process to that share of a processor until the block ends.

    The kernel enforces the limit if a group can be created. Otherwise, the process is stopped for the rest of each
    period. The process may end meanwhile.
    """
    with _limited(pid, share) if os.access(CPU / "cpu.cfs_quota_us", os.W_OK) else _stopped_mostly(pid, share):
        yield


@contextlib.contextmanager
def _limited(pid: int, share: float) -> Iterator[None]:
    group = CPU / f"concertina-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(round(1e6 * PERIOD)))
        (group / "cpu.cfs_quota_us").write_text(str(round(1e6 * PERIOD * share)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (CPU / "cgroup.procs").write_text(process)
        until(lambda: _removed(group), f"that {group} is empty")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # The group still contains a process that has ended.
        group.rmdir()
    return not group.exists()


@contextlib.contextmanager
def _stopped_mostly(pid: int, share: float) -> Iterator[None]:
    over = threading.Event()

    def act() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.wait(PERIOD * share):
                os.kill(pid, signal.SIGSTOP)
                over.wait(PERIOD * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
