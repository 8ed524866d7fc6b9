"""Jobs with a planted problem, and the commands of docs/diagnosis.md that find it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitoring.alerts import SPENT

from builders.cluster.operator_process import Jobs, endless, paced
from builders.prometheus import Prometheus
from builders.until import until
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
SECONDS = "8"
DIVISOR = 120
"""Divisor of the time spans in rules: half an hour becomes fifteen seconds, which are some steps and some status
writes."""
LOOK_AGAIN_SECONDS = 60
"""Seconds to wait for a condition. It is absent for a moment when a round has just begun, as on a busy machine."""
LOOK_BACK = 3600 / DIVISOR
"""Longest time in seconds that a rule looks back."""


def page() -> dict[str, list[tuple[str, str]]]:
    """Return the commands of the page with their expected output, by heading."""
    text = (ROOT / "docs" / "diagnosis.md").read_text().partition("\n## ")[2]
    sections = {}
    for section in text.split("\n## "):
        lines = re.findall(r"^((?:concertina|kubectl) .*?) +# (.*)$", section, re.MULTILINE)
        sections[section.partition("\n")[0]] = lines
    return sections


PAGE = page()


def run(shell: Mapping[str, str], command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=dict(shell), capture_output=True, text=True, timeout=300, check=False
    )


def diagnosed(shell: Mapping[str, str], what: str) -> Object:
    """Return what `concertina diagnose` finds, as JSON, and check its exit status."""
    done = run(shell, f"concertina diagnose {what} --seconds {SECONDS} --json")
    assert done.stdout, done.stderr
    diagnosis: Object = json.loads(done.stdout)
    assert done.returncode == (FOUND if diagnosis["findings"] else 0)
    return diagnosis


def problems(found: Object) -> list[str]:
    return [finding["problem"] for finding in found["findings"]]


def saying(shell: Mapping[str, str], command: str, says: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Return the first run of a command whose output contains the text."""
    runs: list[subprocess.CompletedProcess[str]] = []

    def said() -> bool:
        runs.append(run(shell, command))
        return says in runs[-1].stdout + runs[-1].stderr

    until(said, f"{command}: {says}", lambda: runs[-1].stdout + runs[-1].stderr, limit, pause=1)
    return runs[-1]


def follow(
    shell: Mapping[str, str], section: str, name: str, coordinator: str = "", uri: str = "", alone: bool = True
) -> None:
    """Check that each command of a section prints what the page says.

    `coordinator` is the pod with rank 0, for a section that asks for it. `alone` means that no consequence of the
    problem may be reported as costing more than the problem itself.
    """
    assert PAGE[section]
    for command, says in PAGE[section]:
        for word, value in {"JOB": name, "POD": coordinator, "URI": uri}.items():
            command = re.sub(rf"\b{word}\b", value, command)
        assert says, f"the page says nothing of {command}"
        diagnoses = command.startswith("concertina diagnose")
        asked, limit = (f"{command} --seconds {SECONDS}", 0) if diagnoses else (command, LOOK_AGAIN_SECONDS)
        done = saying(shell, asked, says, limit)
        print(command, done.stdout, done.stderr, sep="\n")
        if diagnoses:
            assert done.returncode == (0 if "Healthy" in says else FOUND)
            assert not alone or f"1. {says}" in done.stdout or "Healthy" in says, "it is not what costs most"


@dataclass(frozen=True)
class Alerts:
    """Alerts of Prometheus for the jobs of a namespace, by problem."""

    prometheus: Prometheus
    jobs: Jobs

    def firing(self, name: str) -> set[Problem]:
        """Return the alerts that fire for this job now."""
        job = {"namespace": self.jobs.namespace, "trainingjob": name}.items()
        alerts = (each for each in self.prometheus.alerts() if each["state"] == "firing")
        return {_problem(each["labels"]) for each in alerts if job <= each["labels"].items()}

    def wait(self, name: str, problem: Problem, besides: frozenset[Problem] = frozenset()) -> None:
        """Wait until the problem's alert is the only one that fires for this job, besides those that follow from it.

        `besides` are the alerts that follow from the problem. By then, the alerts of the job's start are over.
        """
        until(
            lambda: self.firing(name) - besides == {problem},
            f"the alert of {problem} for {name}, and no other",
            lambda: [self.prometheus.alerts(), self.jobs.describe(name)],
        )

    def raised(self, name: str, since: float) -> set[Problem]:
        """Return the alerts that have fired for the job, of those that began after that time (Unix seconds)."""
        job = f'namespace="{self.jobs.namespace}", trainingjob="{name}"'
        fired, began = f'ALERTS{{alertstate="firing", {job}}}', f"ALERTS_FOR_STATE{{{job}}} >= {since}"
        series = self.prometheus.ask(f"count_over_time(({fired} and ignoring (alertstate) {began})[1h:1s])")
        return {_problem(each["metric"]) for each in series}

    def judged(self, name: str, since: float) -> int:
        """Return how often since then the rules were evaluated over a whole window of this job's time."""
        spent = f'{SPENT}{{namespace="{self.jobs.namespace}", trainingjob="{name}"}}'
        seconds = max(1, round(time.time() - since))
        series = self.prometheus.ask(f"count_over_time({spent}[{seconds}s])")
        return max((int(each["value"][1]) for each in series), default=0)


def _problem(labels: Mapping[str, str]) -> Problem:
    return Problem(labels["alertname"].removeprefix("Concertina"))


def bundled(jobs: Jobs, data: Path, name: str, fault: Path | None = None, pace: str = "0.1", **more: Any) -> None:
    """Create a job of the bundled trainer.

    `more` is merged into the spec, and `trainer` into its section. `container`, with its `environment` and `volumes`,
    is a part of the pod.
    """
    parts = ("trainer", "container", "environment", "volumes")
    trainer, container, environment, volumes = (more.pop(key, {}) for key in parts)
    variables: Object = {"PACE": pace, **environment, **({"FAULT": fault} if fault else {})}
    pod = {"containers": [{**paced(**variables), **container}], "volumes": volumes or []}
    jobs.create(name, trainer=endless(data, **trainer), pod=pod, **more)


def fault(folder: Path, text: str) -> Path:
    path = folder / text.replace(" ", "-")
    path.write_text(text)
    return path


def past(jobs: Jobs, name: str, step: int) -> Object:
    """Wait until the job's status reports this step."""
    return jobs.wait(name, lambda job: (job.get("status", {}).get("progress") or {}).get("step", 0) >= step)
