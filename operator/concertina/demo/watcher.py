"""Watches a run from outside, as a user could: the job's status, and the trainers' logs through the API server."""

from __future__ import annotations

import subprocess
import threading
import time

from concertina.demo.history import History, LossPoint, Sample
from concertina.demo.stage import Stage
from concertina_protocol import log_lines
from concertina_protocol.log_lines import StepDone

LOOK_EVERY = 0.25  # seconds


class Watcher:
    """Fills `history` until it is closed: a thread that looks at the status, and one a pod that follows its log."""

    def __init__(self, stage: Stage, job: str) -> None:
        self._stage, self._job = stage, job
        self.history = History()
        self._logs: dict[str, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def __enter__(self) -> Watcher:
        self._spawn(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for process in self._logs.values():
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join(timeout=5)

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _look(self) -> None:
        while not self._closing.wait(LOOK_EVERY):
            status = self._stage.job(self._job).get("status", {})
            world = status.get("world", {})
            step = status.get("progress", {}).get("step", 0)
            running = status.get("conditions") and self.word(status) in ("Training", "Draining")
            members = world.get("replicas", 0) if running else 0
            self.history.status = status
            self.history.samples.append(Sample(time.time(), step, members, world.get("round", 0)))
            for pod in self._stage.pods(self._job):
                if pod["status"].get("phase") == "Running" and pod["metadata"]["name"] not in self._logs:
                    self._follow(pod["metadata"]["name"])

    @staticmethod
    def word(status: dict) -> str:  # type: ignore[type-arg]
        """The job's state in a word, as in the column of `kubectl get`."""
        return str(next((c["reason"] for c in status.get("conditions", []) if c["type"] == "Ready"), ""))

    def _follow(self, pod: str) -> None:
        record = self._stage.cluster.record
        command = [record.kubectl, f"--kubeconfig={record.kubeconfig}", "logs", "-f", pod, "-c", "trainer"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._logs[pod] = process
        self._spawn(self._read, process)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            line = log_lines.parse(text.rstrip("\n"))
            if isinstance(line, StepDone):
                self.history.losses.append(LossPoint(time.time(), line.step, line.loss))
