"""Faults by a program that runs beside the worker, in its own container: what a process may do to another there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from concertina.cli.connection import Complaint
from concertina.cli.drill.site import Blow, Site
from concertina.cluster.errors import ApiError

STRAGGLE_SECONDS = 120.0
"""After so long a slowed worker is let go, whatever becomes of the drill."""

# Eats memory until the kernel has killed the worker, which asks to be the first to go; never more than the limit.
_EAT = """
import os, sys
worker = sys.argv[1]
def alive():
    try:
        return open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
words = [open(path).read().strip() for path in limits if os.path.exists(path)]
limit = int(words[0]) if words and words[0].isdigit() else 1 << 62
if limit > 1 << 40:
    sys.exit("NOLIMIT")
with open(f"/proc/{worker}/oom_score_adj", "w") as score:
    score.write("1000")
eaten = []
while alive() and len(eaten) << 22 < limit:
    eaten.append(b"x" * (1 << 22))
print("killed" if not alive() else "survived")
"""

# Shares one CPU with the worker and leaves it little: nothing is stopped, everything takes longer.
_MARK = "concertina-drill-straggle"
_SLOW = """
import os, sys, time
worker, seconds = int(sys.argv[1]), float(sys.argv[2])
cpu = max(os.sched_getaffinity(worker))
for thread in map(int, os.listdir(f"/proc/{worker}/task")):
    os.sched_setaffinity(thread, {cpu})
    os.setpriority(os.PRIO_PROCESS, thread, 19)
os.sched_setaffinity(0, {cpu})
os.setpriority(os.PRIO_PROCESS, 0, 10)
end = time.monotonic() + seconds
while time.monotonic() < end and os.path.exists(f"/proc/{worker}"):
    for _ in range(100000):
        pass
"""


# The end of _SLOW's process, and all CPUs for the worker again.
_RELEASE = """
import os, signal, sys
worker, mark = sys.argv[1], sys.argv[2].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(pid) != os.getpid() and mark in open(f"/proc/{pid}/cmdline", "rb").read():
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
for thread in map(int, os.listdir(f"/proc/{worker}/task")):
    os.sched_setaffinity(thread, range(os.cpu_count()))
"""


@asynccontextmanager
async def out_of_memory(site: Site) -> AsyncIterator[Blow]:
    """A worker's container runs out of memory: the kernel kills the worker."""
    member = await site.victim()
    pid = await site.worker(member)
    at = time.time()
    try:
        said = await site.run_python(member.replica, _EAT, pid, seconds=60.0)
    except ApiError as error:
        if "NOLIMIT" in str(error):
            raise Complaint(
                "The container trainer has no memory limit: set resources.limits.memory to play this."
            ) from error
        said = "killed"  # and what ate, and all that could tell of it
    if said != "killed":
        raise Complaint(f"The worker of {member.replica} outlived its container's memory limit.")
    yield Blow(at, f"ate the memory of {member.replica} on {member.node} until the kernel killed its worker")


@asynccontextmanager
async def straggle(site: Site) -> AsyncIterator[Blow]:
    """A worker gets a small share of one CPU."""
    member = await site.victim()
    pid = await site.worker(member)
    at = time.time()
    slowing = asyncio.create_task(
        site.run_python(member.replica, _SLOW, pid, str(STRAGGLE_SECONDS), _MARK, seconds=STRAGGLE_SECONDS + 30)
    )
    try:
        yield Blow(at, f"left the worker of {member.replica} on {member.node} a small share of one CPU")
    finally:
        with suppress(ApiError):  # its worker, or its pod, is gone
            await site.run_python(member.replica, _RELEASE, pid, _MARK)
        slowing.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await slowing
