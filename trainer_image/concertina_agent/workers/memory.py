"""Whether the kernel has killed processes of this container for want of memory: of one worker the pod's status says
nothing (decision "Out of memory is read from the cgroup")."""

from __future__ import annotations

import contextlib

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""As the container sees its own cgroup, version 2 and version 1."""


def oom_kills(counters: tuple[str, ...] = COUNTERS) -> int:
    """How many so far; 0 where the kernel doesn't say. A kill is counted before its process has ended."""
    for path in counters:
        with contextlib.suppress(OSError), open(path) as lines:
            for line in lines:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0
