"""The in-process restart of nvidia-resiliency-ext for the comparison in `recovery.py`: three ranks over gloo.

nvidia-resiliency-ext is not a dependency of this project. It is installed once into a separate folder (see `install`),
and uses the torch of this environment. To measure only it: python benchmarks/recovery.py --only nvidia
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
from pathlib import Path

import peer_packages
from recovery_torchrun import kill_tree, steps, wait_for_world

VERSION = "0.4.1"
SCRIPT = Path(__file__).parent / "scripts" / "nvidia_ddp.py"
FOLDER = Path(__file__).parents[1] / "build" / f"nvidia-resiliency-ext-{VERSION}"
SCENARIOS = ("worker", "stopped worker")
"""Scenarios.

Rank 0 hosts the store, and its loss ends the job. A lost rank is not replaced.
"""


def install() -> Path:
    """Return the folder with nvidia-resiliency-ext and its dependencies, except torch. Install them on first use."""
    needs = ["defusedxml", "nvidia-ml-py", "packaging", "psutil", "pynvml", "pyyaml"]
    return peer_packages.install(FOLDER, needs, ["--upgrade", "--no-deps", f"nvidia-resiliency-ext=={VERSION}"])


@contextmanager
def ranks(count: int, tuned: bool, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` ranks in separate sessions, and kill all of them at the end."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        second.bind(("127.0.0.1", port + 1))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(install()),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), "--trace", str(folder), *(["--tuned"] if tuned else [])]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with (folder / f"rank-{rank}.log").open("wb") as out:
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=out, stderr=out, start_new_session=True))
        yield processes
    finally:
        for process in processes:
            kill_tree(process.pid)
            process.wait()


def measure(scenario: str, tuned: bool, limit: float) -> float:
    """Return the seconds from the fault to the end of the first step of the smaller world.

    The result is infinite if there is no such step within `limit` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="recovery-nvidia-"))
    try:
        with ranks(3, tuned, folder) as processes:
            wait_for_world(folder, 3, 90 + limit)
            victim = processes[1].pid
            injected_at = time.time()
            os.kill(victim, signal.SIGSTOP if scenario.startswith("stopped") else signal.SIGKILL)
            while time.time() < injected_at + limit:
                after = [step for step in steps(folder) if step.at > injected_at and step.world < 3]
                if after:
                    return after[0].at - injected_at
                time.sleep(0.05)
            return float("inf")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
