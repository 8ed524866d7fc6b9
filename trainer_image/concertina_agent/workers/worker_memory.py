"""How much memory this container has, and whether the kernel has killed processes of it for want of more: of one worker
the pod's status says nothing (decision "Out of memory is read from the cgroup")."""

from __future__ import annotations

import contextlib
import os

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""As the container sees its own cgroup, version 2 and version 1."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Likewise."""


def oom_kills(counters: tuple[str, ...] = COUNTERS) -> int:
    """How many so far; 0 where the kernel doesn't say. A kill is counted before its process has ended."""
    for path in counters:
        with contextlib.suppress(OSError), open(path) as lines:
            for line in lines:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def container_memory(limits: tuple[str, ...] = LIMITS) -> int:
    """Bytes that all processes of this container may have: its limit, or what the machine has."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # "max" is no number
            return min(int(file.read()), machine)
    return machine
