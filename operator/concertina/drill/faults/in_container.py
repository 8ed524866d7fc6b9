"""Faults by a program that runs beside the worker, in its own container: what a process may do to another there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from concertina.drill.target import DrillTarget, Injection
from concertina.kube.errors import ApiError
from concertina.terminal.connection import Complaint

STRAGGLE_SECONDS = 120.0
"""After so long a slowed worker is let go, whatever becomes of the drill."""

# Fills a file in memory until the kernel has killed the worker; never more than the limit. What is in a file counts
# for the container and for no process, and the worker is made the first to go: so the kernel chooses it.
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
    print("unlimited")
    sys.exit()
with open(f"/proc/{worker}/oom_score_adj", "w") as score:
    score.write("1000")
mounted = [line.split()[1:3] for line in open("/proc/mounts")]
folders = [path for path, kind in mounted if kind == "tmpfs" and os.access(path, os.W_OK)]
def room(path):
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
file = os.open(max(folders, key=room), os.O_TMPFILE | os.O_WRONLY)
eaten = 0
while alive() and eaten < limit:
    eaten += os.write(file, bytes(1 << 20))
print("killed" if not alive() else "survived")
"""

# Stops the worker for moments, whenever it is found at work: so it computes at a third of its speed. Not while it waits
# for others: a stop that falls into a collective looks to it, and to all, like a slow network.
_MARK = "concertina-drill-straggle"
_SLOW = """
import os, signal, sys, time
worker, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
def computes():
    return open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[0] == "R"
try:
    while time.monotonic() < end:
        if not computes():
            time.sleep(0.001)
            continue
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(worker, signal.SIGCONT)
        time.sleep(0.01)
except (ProcessLookupError, FileNotFoundError):
    pass
"""

# The end of _SLOW's process; the worker goes on.
_RELEASE = """
import os, signal, sys
worker, mark = int(sys.argv[1]), sys.argv[2].encode()
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    try:
        if pid != os.getpid() and mark in open(f"/proc/{pid}/cmdline", "rb").read():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
os.kill(worker, signal.SIGCONT)
"""


@asynccontextmanager
async def out_of_memory(target: DrillTarget) -> AsyncIterator[Injection]:
    """A worker's container runs out of memory: the kernel kills the worker."""
    member = await target.victim()
    pid = await target.worker(member)
    at = time.time()
    try:
        said = await target.run_python(member.replica, _EAT, pid, seconds=60.0)
    except ApiError:  # what ate was killed too: what follows shows whether the worker was
        said = "killed"
    if said == "unlimited":
        raise Complaint("The container trainer has no memory limit: set resources.limits.memory to play this.")
    if said != "killed":
        raise Complaint(f"The worker of {member.replica} outlived its container's memory limit.")
    yield Injection(at, f"ate the memory of {member.replica} on {member.node} until the kernel killed its worker")


@asynccontextmanager
async def straggle(target: DrillTarget) -> AsyncIterator[Injection]:
    """A worker is stopped for moments whenever it computes: all wait for it in every step."""
    member = await target.victim()
    pid = await target.worker(member)
    at = time.time()
    arguments = (pid, str(STRAGGLE_SECONDS), _MARK)
    slowing = asyncio.create_task(target.run_python(member.replica, _SLOW, *arguments, seconds=STRAGGLE_SECONDS + 30))
    await asyncio.wait({slowing}, timeout=2.0)
    if slowing.done():
        why = slowing.exception() or slowing.result() or "it ended just now; play the drill again"
        raise Complaint(f"The worker of {member.replica} can't be slowed: {why}")
    try:
        done = f"slowed the worker of {member.replica} on {member.node}: it computes at a third of its speed"
        yield Injection(at, done, replica=member.replica)
    finally:
        with suppress(ApiError):  # its worker, or its pod, is gone
            await target.run_python(member.replica, _RELEASE, pid, _MARK)
        slowing.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await slowing
