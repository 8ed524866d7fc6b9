"""Faults that a program in the worker's container causes. The program runs next to the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from concertina.drill.target import DrillTarget, Injection
from concertina.kube.errors import ApiError
from concertina.terminal.cluster_connection import UserError

STRAGGLE_SECONDS = 120.0
"""Maximum time in seconds for which a worker is slowed down, even if the drill ends early or is killed."""

# Prints the memory limit of the container and the start time of the worker. The start time identifies the worker,
# because a restarted container reuses pids. The program also makes the worker the first process that the kernel kills
# when memory runs out. Without a limit, it prints nothing.
_LIMIT = """
import os, sys
limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
words = [open(path).read().strip() for path in limits if os.path.exists(path)]
limit = int(words[0]) if words and words[0].isdigit() else 1 << 62
if limit <= 1 << 40:
    with open(f"/proc/{sys.argv[1]}/oom_score_adj", "w") as score:
        score.write("1000")
    print(limit, open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()[19])
"""

# Prints `alive` if the worker with this pid and start time still runs.
_LIVES = """
import sys
try:
    fields = open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()
    print("alive" if fields[0] not in "ZX" and fields[19] == sys.argv[2] else "")
except OSError:
    pass
"""

# Fills a file in memory until the kernel has killed the worker, but never beyond the limit. The file's memory counts
# for the container but for no process, so the kernel kills the worker, which is the preferred process. The file is not
# on a mount, because /dev/shm and other tmpfs mounts are smaller than the container's memory limit.
_EAT = """
import os, sys
worker, limit = sys.argv[1], int(sys.argv[2])
def alive():
    try:
        return open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
file = os.memfd_create("eaten")
eaten = 0
while alive() and eaten < limit:
    eaten += os.write(file, bytes(1 << 20))
"""

# Stops the worker briefly whenever it computes, so that it computes at a third of its speed. The program does not stop
# the worker while it waits for others. During a collective, that would look like a slow network to all workers.
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

# Kills the process that runs _SLOW, and lets the worker continue.
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
    """Fill the memory of a worker's container until the kernel kills the worker.

    Raises:
        UserError: When the container has no memory limit, or the worker survives.
    """
    member = await target.victim()
    pid = await target.worker(member)
    limit, _, born = (await target.run_python(member.replica, _LIMIT, pid)).partition(" ")
    if not limit:
        raise UserError("The container trainer has no memory limit: set resources.limits.memory to run this drill.")
    at, detail = time.time(), ""
    try:
        await target.run_python(member.replica, _EAT, pid, limit, seconds=60.0)
    except ApiError as error:  # The kernel may have killed this program or the whole container too.
        detail = f": {error}"
    if await _is_alive(target, member.replica, pid, born):
        raise UserError(f"The worker of {member.replica} survived its container's memory limit{detail}.")
    yield Injection(at, f"used up the memory of {member.replica} on {member.node} until the kernel killed its worker")


async def _is_alive(target: DrillTarget, replica: str, pid: str, born: str) -> bool:
    """Return whether the worker is alive.

    If no program can run in its container any more, the worker counts as dead.
    """
    try:
        return bool(await target.run_python(replica, _LIVES, pid, born))
    except ApiError:
        return False


@asynccontextmanager
async def straggle(target: DrillTarget) -> AsyncIterator[Injection]:
    """Pause a worker repeatedly while it computes, so that all other workers wait for it in every step.

    Raises:
        UserError: When the worker can't be slowed down.
    """
    member = await target.victim()
    pid = await target.worker(member)
    at = time.time()
    arguments = (pid, str(STRAGGLE_SECONDS), _MARK)
    slowing = asyncio.create_task(target.run_python(member.replica, _SLOW, *arguments, seconds=STRAGGLE_SECONDS + 30))
    await asyncio.wait({slowing}, timeout=2.0)
    if slowing.done():
        reason = slowing.exception() or slowing.result() or "it has ended; run the drill again"
        raise UserError(f"The worker of {member.replica} can't be slowed: {reason}")
    try:
        description = f"slowed the worker of {member.replica} on {member.node}: it computes at a third of its speed"
        yield Injection(at, description, replica=member.replica)
    finally:
        with suppress(ApiError):  # The worker or its pod is gone.
            await target.run_python(member.replica, _RELEASE, pid, _MARK)
        slowing.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await slowing
