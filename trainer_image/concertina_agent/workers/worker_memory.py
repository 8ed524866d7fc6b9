"""Memory of this container, and the number of its processes that the kernel has killed for lack of memory.

If the kernel kills a single worker, the pod's status does not show it (decision "Out-of-memory kills are read from the
cgroup").
"""

from __future__ import annotations

import contextlib
import os

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Paths of the files that count OOM kills in the container's own cgroup, for cgroups of version 2 and version 1."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Paths of the files with the memory limit of the container's own cgroup, for cgroups of version 2 and version 1."""


def oom_kills(counters: tuple[str, ...] = COUNTERS) -> int:
    """Return the number of OOM kills in this container so far, or 0 if the kernel does not count them.

    The kernel counts a kill before the killed process has ended.
    """
    for path in counters:
        with contextlib.suppress(OSError), open(path) as lines:
            for line in lines:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def anonymous_memory(pid: int) -> int:
    """Return the bytes of memory that only the process `pid` uses, or 0 if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return 0


def container_memory(limits: tuple[str, ...] = LIMITS) -> int:
    """Return the bytes of memory that the processes of this container may use together.

    This is the container's limit, or without a limit, the memory of the machine.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # without a limit, the file contains "max"
            return min(int(file.read()), machine)
    return machine
