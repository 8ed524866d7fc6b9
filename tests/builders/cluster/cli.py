"""The concertina command, and statuses for it, written as the operator would write them.

A call runs the command in the process of the test, because a new process spends a second on imports. `start` runs it as
a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from concertina.api.status import Condition, JobProgress, JobStatus, rfc3339
from concertina.api.world import World
from concertina.cli.main import app
from concertina.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "examples" / "demo.yaml"
COMMAND = [str(Path(sys.executable).parent / "concertina")]
GIVE_UP = 60.0
NOW = rfc3339(1_800_000_000)


@dataclass(frozen=True)
class Cli:
    cluster: LocalCluster
    namespace: str

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [*arguments, "-n", self.namespace]
        done = CliRunner().invoke(app, command, input=stdin, env={"KUBECONFIG": str(self.cluster.kubeconfig)})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*COMMAND, *arguments, "-n", self.namespace]
        return subprocess.Popen(
            command, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def environment(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def write(self, name: str, status: JobStatus) -> None:
        """Write a status, as the operator would."""
        patch = json.dumps({"status": status.manifest()})
        self.kubectl("patch", f"tj/{name}", "--subresource=status", "--type=merge", "-p", patch)


def status(word: str, message: str, *more: str) -> JobStatus:
    """Return a status with this reason of Ready, and with further conditions that are True."""
    conditions = [Condition(type="Ready", status="True", reason=word, message=message, last_transition_time=NOW)]
    conditions += [Condition(type=kind, status="True", reason=word, last_transition_time=NOW) for kind in more]
    return JobStatus(
        observed_generation=1,
        conditions=tuple(conditions),
        world=World(round=2, size="3/3", replicas=3, workers=3),
        progress=JobProgress(step=100, steps=400, percent=25.0, loss=2.5, tokens_per_second=4321.0, at=NOW),
    )
