"""Runs in which a problem is planted, and the commands of docs/diagnosis.md by which somebody finds it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitoring.alerts import SPENT

from builders.cluster.operator import Jobs, endless, paced
from builders.prometheus import Prometheus
from builders.until import until
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
SECONDS = "8"
DIVISOR = 120
"""Of the time that rules ask for: half an hour is fifteen seconds, some steps and some writes of a status."""
LOOK_AGAIN_SECONDS = 60
"""A condition is not there for a moment where a round has just begun, as on a busy machine."""
LOOK_BACK = 3600 / DIVISOR
"""Seconds: the longest that a rule looks back."""


def page() -> dict[str, list[tuple[str, str]]]:
    """By heading: commands, and what they print."""
    text = (ROOT / "docs" / "diagnosis.md").read_text().partition("\n## ")[2]
    found = {}
    for section in text.split("\n## "):
        lines = re.findall(r"^((?:concertina|kubectl) .*?) +# (.*)$", section, re.MULTILINE)
        found[section.partition("\n")[0]] = lines
    return found


PAGE = page()


def run(shell: Mapping[str, str], command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=dict(shell), capture_output=True, text=True, timeout=300, check=False
    )


def saying(shell: Mapping[str, str], command: str, says: str, limit: float) -> subprocess.CompletedProcess[str]:
    """The first run of it that says so."""
    runs: list[subprocess.CompletedProcess[str]] = []

    def said() -> bool:
        runs.append(run(shell, command))
        return says in runs[-1].stdout + runs[-1].stderr

    until(said, f"{command}: {says}", lambda: runs[-1].stdout + runs[-1].stderr, limit, pause=1)
    return runs[-1]


def follow(
    shell: Mapping[str, str], section: str, name: str, coordinator: str = "", uri: str = "", alone: bool = True
) -> None:
    """Each command of a section says what the page says. `coordinator`: the pod with rank 0, where the section asks for
    it. `alone`: nothing follows from the problem that may cost more than what is told of itself."""
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
    """What Prometheus has to say of the jobs of a namespace, by problem."""

    prometheus: Prometheus
    jobs: Jobs

    def firing(self, name: str) -> set[Problem]:
        """The alerts that fire for this job now."""
        job = {"namespace": self.jobs.namespace, "trainingjob": name}.items()
        alerts = (each for each in self.prometheus.alerts() if each["state"] == "firing")
        return {_problem(each["labels"]) for each in alerts if job <= each["labels"].items()}

    def wait(self, name: str, problem: Problem, besides: frozenset[Problem] = frozenset()) -> None:
        """Until its alert fires for this job, and no other does (but those `besides`, which follow from it): what comes
        of a start is over by then."""
        until(
            lambda: self.firing(name) - besides == {problem},
            f"the alert of {problem} for {name}, and no other",
            lambda: [self.prometheus.alerts(), self.jobs.describe(name)],
        )

    def raised(self, name: str, since: float) -> set[Problem]:
        """The alerts that have fired for it, of what began after that time (Unix seconds)."""
        job = f'namespace="{self.jobs.namespace}", trainingjob="{name}"'
        fired, began = f'ALERTS{{alertstate="firing", {job}}}', f"ALERTS_FOR_STATE{{{job}}} >= {since}"
        series = self.prometheus.ask(f"count_over_time(({fired} and ignoring (alertstate) {began})[1h:1s])")
        return {_problem(each["metric"]) for each in series}

    def judged(self, name: str, since: float) -> int:
        """How often since then the rules had a whole window of this job's time before them."""
        spent = f'{SPENT}{{namespace="{self.jobs.namespace}", trainingjob="{name}"}}'
        seconds = max(1, round(time.time() - since))
        series = self.prometheus.ask(f"count_over_time({spent}[{seconds}s])")
        return max((int(each["value"][1]) for each in series), default=0)


def _problem(labels: Mapping[str, str]) -> Problem:
    return Problem(labels["alertname"].removeprefix("Concertina"))


def bundled(jobs: Jobs, data: Path, name: str, fault: Path | None = None, pace: str = "0.1", **more: Any) -> None:
    """`more`: of the spec; `trainer` is merged, `container`, its `environment` and `volumes` are parts of the pod."""
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
    """As soon as its status tells of this step."""
    return jobs.wait(name, lambda job: (job.get("status", {}).get("progress") or {}).get("step", 0) >= step)
