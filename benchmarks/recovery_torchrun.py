"""torchrun for the comparison in `recovery.py`: three agents on one machine, and the faults.

The agents use the c10d rendezvous with nnodes 2:3. To measure only torchrun: python benchmarks/recovery.py --only
torchrun
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from until import until

SCRIPT = Path(__file__).parent / "scripts" / "elastic_ddp.py"
SCENARIOS = ("worker", "member", "coordinator")
TUNED = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"]


@dataclass(frozen=True)
class Step:
    """One line of a worker's trace."""

    at: float
    restart: int
    world: int
    rank: int
    step: int
    seconds: float
    pid: int
    committed: float = 0.0
    """Seconds for saving the previous step, if the script reports them."""


def steps(log: Path) -> list[Step]:
    """Return all finished steps of all workers, in order of time."""
    finished = []
    for path in log.glob("*.txt"):
        for line in path.read_text().splitlines():
            fields = line.split()
            if len(fields) in (6, 7):
                at, restart, world, rank, step, seconds, *committed = fields
                place = (int(restart), int(world), int(rank), int(step))
                finished.append(Step(float(at), *place, float(seconds), int(path.stem), *map(float, committed)))
    return sorted(finished, key=lambda s: s.at)


@contextmanager
def torchrun(count: int, tuned: bool, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` torchrun agents in separate sessions, and kill all of them at the end.

    The first agent hosts the rendezvous.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if tuned:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{count}", "--nproc-per-node", "1",
               "--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
               "--rdzv-id", "bench", "--local-addr", "127.0.0.1", *(TUNED if tuned else []),
               str(SCRIPT), "--trace", str(folder), "--checkpoint", str(folder / "model.pt")]  # fmt: skip
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            with (folder / f"agent-{number}.log").open("wb") as out:
                agents.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
                )
            if number == 0:  # otherwise another agent can be the first at the port
                until("the store of the first agent", 60, lambda: _listens(port))
        yield agents
    finally:
        for agent in agents:
            kill_tree(agent.pid)
            agent.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def children(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    pids = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if Path(f"/proc/{pid}").exists() else []:
        pids += [int(child), *children(int(child))]
    return pids


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all of its descendants."""
    for descendant in [pid, *children(pid)]:
        try:
            os.kill(descendant, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for_world(folder: Path, world: int, limit: float) -> list[Step]:
    """Wait until every one of `world` ranks has finished five steps, and return all steps so far.

    Raises:
        TimeoutError: When that takes too long. The message contains the folder of the logs.
    """
    give_up = time.monotonic() + limit
    while time.monotonic() < give_up:
        seen = steps(folder)
        if sum(s.world == world for s in seen) >= 5 * world:
            return seen
        time.sleep(0.2)
    raise TimeoutError(f"no world of {world} within {limit:.0f} s; logs are in {folder}")


def measure(scenario: str, tuned: bool, limit: float) -> float:
    """Return the seconds from the SIGKILL to the end of the first step after it.

    The result is infinite if there is no such step within `limit` seconds.

    Args:
        scenario: `worker` kills a worker other than rank 0. `coordinator` kills the torchrun that hosts the
            rendezvous, with its worker. `member` kills another torchrun with its worker, like the loss of a node.
        tuned: Whether torchrun uses tuned settings.
        limit: Time limit in seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="recovery-torchrun-"))
    try:
        with torchrun(3, tuned, folder) as agents:
            seen = wait_for_world(folder, 3, 90 + limit)
            last = seen[-1].step
            worker = next(s.pid for s in reversed(seen) if s.rank == 1 and s.world == 3)
            killed_at = time.time()
            if scenario == "worker":
                os.kill(worker, signal.SIGKILL)
            else:
                kill_tree(agents[0 if scenario == "coordinator" else 1].pid)
            while time.time() < killed_at + limit:
                after = [
                    s
                    for s in steps(folder)
                    if s.at > killed_at and s.pid not in {p.pid for p in seen} and s.step >= last - 1
                ]
                if after:
                    return after[0].at - killed_at
                time.sleep(0.1)
            return float("inf")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
