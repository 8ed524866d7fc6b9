"""torchft for the comparison in `recovery.py`: three replica groups with one process each, and a lighthouse.

torchft is not a dependency of this project. It is installed once into a separate folder (see `install`), and uses the
torch of this environment. To measure only torchft: python benchmarks/recovery.py --only torchft
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peer_packages
from recovery_torchrun import Step, kill_tree, steps, wait_for_world

VERSION = "0.2.0"
SCRIPT = Path(__file__).parent / "scripts" / "torchft_ddp.py"
FOLDER = Path(__file__).parents[1] / "build" / f"torchft-{VERSION}"
SCENARIOS = ("member", "coordinator", "stopped worker")
"""Scenarios.

torchft has no coordinator, so `coordinator` kills the replica group that was started first. The lighthouse is not
affected by faults.
"""
LIGHTHOUSE = """
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=50,
                          heartbeat_timeout_ms=1000)
print(server.address(), flush=True)
time.sleep(100000)
"""


def install() -> Path:
    """Return the folder with torchft and its dependencies, except torch. Install them on first use."""
    needs = ["opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
    return peer_packages.install(FOLDER, needs, ["--upgrade", "--no-deps", f"torchft=={VERSION}"])


@contextmanager
def torchft(count: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a lighthouse and `count` replica groups in separate sessions, and kill all of them at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(install())}
    lighthouse = subprocess.Popen(
        [sys.executable, "-c", LIGHTHOUSE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    groups: list[subprocess.Popen[bytes]] = []
    try:
        assert lighthouse.stdout is not None
        environment["TORCHFT_LIGHTHOUSE"] = lighthouse.stdout.readline().decode().strip()
        for number in range(count):
            command = [sys.executable, str(SCRIPT), "--trace", str(folder), "--replica", f"group-{number}-"]
            with (folder / f"group-{number}.log").open("wb") as out:
                groups.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
                )
        yield groups
    finally:
        for process in (*groups, lighthouse):
            kill_tree(process.pid)
            process.wait()


def measure(scenario: str, limit: float) -> float:
    """Return the seconds from the fault to the end of the first step that a remaining group commits.

    The result is infinite if there is no such step within `limit` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="recovery-torchft-"))
    try:
        with torchft(3, folder) as groups:
            wait_for_world(folder, 3, 90 + limit)
            victim = groups[0 if scenario == "coordinator" else 1].pid
            injected_at = time.time()
            os.kill(victim, signal.SIGSTOP if scenario.startswith("stopped") else signal.SIGKILL)
            while time.time() < injected_at + limit:
                after = [step for step in steps(folder) if _without(step, victim, injected_at)]
                if after:
                    return after[0].at - injected_at
                time.sleep(0.05)
            return float("inf")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without(step: Step, victim: int, since: float) -> bool:
    return step.at > since and step.pid != victim and step.world < 3
