"""Memory of this container, and whether the kernel has killed processes in it for lack of memory.

The pod's status does not show the kill of a single worker (decision "Out of memory is read from the cgroup").
"""

from __future__ import annotations

import contextlib
import os

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Paths of the counters in the container's own cgroup, version 2 and version 1."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Paths of the limits in the container's own cgroup, version 2 and version 1."""


def oom_kills(counters: tuple[str, ...] = COUNTERS) -> int:
    """Return the number of OOM kills so far, or 0 if the kernel does not provide it.

    A kill is counted before its process has ended.
    """
    for path in counters:
        with contextlib.suppress(OSError), open(path) as lines:
            for line in lines:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def anonymous_memory(pid: int) -> int:
    """Return the bytes of a process's own memory, or 0 if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return 0


def container_memory(limits: tuple[str, ...] = LIMITS) -> int:
    """Return the bytes that all processes of this container may use: its limit, or the machine's memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # "max" is no number
            return min(int(file.read()), machine)
    return machine
