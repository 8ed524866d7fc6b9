"""Observations of the soak test: the logs of all pods, the operator's memory, and objects that remain at the end."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concertina.demo.stage import SYSTEM, Stage
from concertina.local.host import processes

PAGE = os.sysconf("SC_PAGE_SIZE") / 2**20  # MiB
LOOK_EVERY = 2.0
Container = tuple[str, int]
"""Uid of a pod, and number of restarts of its trainer container. Each restart begins a new log."""


class Logs:
    """Complete logs of all pods of the jobs. They are copied while a pod exists, because its log is deleted with it."""

    def __init__(self, stage: Stage, names: list[str]) -> None:
        self._stage, self._names = stage, names
        self._files: dict[str, dict[Container, Path]] = defaultdict(dict)
        self._following: list[subprocess.Popen[bytes]] = []
        self._folder = stage.cluster.record.directory / "soak-logs"
        self._folder.mkdir()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def lines(self, job: str) -> list[list[str]]:
        """Return the log lines of each container so far."""
        return [path.read_text(errors="replace").splitlines() for path in self._files[job].values() if path.exists()]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for process in self._following:
            process.kill()
            process.wait()

    def _look_on(self) -> None:
        streams: dict[Container, subprocess.Popen[bytes]] = {}
        while not self._over.wait(0.3):
            for job in self._names:
                try:
                    pods = self._stage.pods(job)
                except Exception:
                    continue
                for pod in pods:
                    container = pod["metadata"]["uid"], _restarts(pod)
                    stream = streams.get(container)
                    if pod["status"].get("phase") == "Running" and (stream is None or stream.poll() is not None):
                        streams[container] = self._follow(job, container, pod["metadata"]["name"])

    def _follow(self, job: str, container: Container, name: str) -> subprocess.Popen[bytes]:
        record = self._stage.cluster.record
        command = [record.kubectl, "--kubeconfig", str(record.kubeconfig), "logs", "-f", name, "-c", "trainer"]
        path = self._folder / f"{container[0]}-{len(self._following)}"
        before = self._files[job].get(container)
        with path.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        self._following.append(process)
        if before is None or before.stat().st_size == 0:
            self._files[job][container] = path
        else:  # The old file is used until the new stream has reached the same length.
            threading.Thread(target=self._replace, args=(job, container, before, path), daemon=True).start()
        return process

    def _replace(self, job: str, container: Container, before: Path, path: Path) -> None:
        while not self._over.wait(0.2):
            if path.stat().st_size >= before.stat().st_size:
                self._files[job][container] = path
                return


def _restarts(pod: Any) -> int:
    statuses = pod["status"].get("containerStatuses") or ()
    return next((status["restartCount"] for status in statuses if status["name"] == "trainer"), 0)


class Memory:
    """Resident memory of the operator over time, for each of its processes."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.series: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """Unix times in seconds with memory in MiB, by pid."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def slope(self, peaks: Sequence[float]) -> tuple[float, float]:
        """Return the growth of an operator process in MiB per hour, and the duration of the measurement in minutes.

        Python does not release memory that it needed at a peak. The measurement therefore begins after the first peak
        in the lifetime of a process. Without a peak, it begins a minute after the start. The process with the longest
        measurement is used.

        Args:
            peaks: Unix times in seconds at which the number of jobs was normal again after a peak.
        """
        spans = [_settled(points, peaks) for points in self.series.values()]
        points = max(spans, key=lambda span: span[-1][0] - span[0][0] if span else 0.0, default=[])
        if len(points) < 10:
            return 0.0, 0.0
        minutes = (points[-1][0] - points[0][0]) / 60
        mean_at = sum(at for at, _ in points) / len(points)
        mean_size = sum(size for _, size in points) / len(points)
        spread = sum((at - mean_at) ** 2 for at, _ in points)
        return 3600 * sum((at - mean_at) * (size - mean_size) for at, size in points) / spread, minutes

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            try:
                pods = self._stage.cluster.api.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
            except Exception:
                continue
            for pod in pods:
                process = processes.container({"POD_NAME": pod["metadata"]["name"]})
                if process is not None:
                    self._note(process.pid)

    def _note(self, pid: int) -> None:
        try:
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            return
        self.series[pid].append((time.time(), round(resident * PAGE, 2)))


def _settled(points: list[tuple[float, float]], peaks: Sequence[float]) -> list[tuple[float, float]]:
    """Return the memory values after the process's first peak.

    Without a peak, return those after the process's first minute.
    """
    begin, end = points[0][0], points[-1][0]
    settled = next((peak for peak in sorted(peaks) if begin < peak < end), begin + 60.0)
    return [(at, size) for at, size in points if at >= settled]


def left_behind(stage: Stage, uids: list[str]) -> list[str]:
    """Return a line for each pod, Secret and process of deleted jobs that still exists after a minute."""
    give_up = time.monotonic() + 60
    while (left := _left(stage, uids)) and time.monotonic() < give_up:
        time.sleep(1)
    return left


def _left(stage: Stage, uids: list[str]) -> list[str]:
    lines = []
    for kind in ("pods", "secrets"):
        for item in stage.cluster.api.call("GET", f"/api/v1/namespaces/default/{kind}")["items"]:
            if item["metadata"].get("ownerReferences"):
                lines.append(f"{kind[:-1]} {item['metadata']['name']}")
    marks = [f"CONCERTINA_UID={uid}\0".encode() for uid in uids]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if any(mark in environment for mark in marks):
            lines.append(f"process {folder.name}")
    return lines
