"""Runs side by side: one without a problem, and some whose problem needs no other load on the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs
from builders.cluster.planted import LOOK_BACK, Alerts, bundled, diagnosed, fault, follow, past, problems
from builders.prometheus import needed
from builders.until import until
from concertina.diagnosis.problems import Problem

LAW = "tests/cluster/operator/diagnosis/test_planted.py::test_its_alert_fires_and_no_other[reads-slowly]"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long(law=LAW), needed]
HEALTHY = "healthy"
RUNS = {
    "Nothing is wrong": (HEALTHY, lambda jobs: past(jobs, HEALTHY, 6)),
    "A slow rank": (
        "one-is-slow",
        lambda jobs: jobs.wait("one-is-slow", lambda job: job.get("status", {}).get("stragglers")),
    ),
    "A script that raises an exception": ("raises", lambda jobs: jobs.wait_true("raises", "Failed")),
    "A command that can't be started": ("no-command", lambda jobs: jobs.wait_true("no-command", "Failed")),
    "Pods that can't be scheduled": ("nowhere", lambda jobs: jobs.wait_reason("nowhere", "Waiting")),
    "The loss is not finite": ("explodes", lambda jobs: jobs.wait_true("explodes", "Failed")),
}
"""Jobs by heading, each with the condition to wait for."""
ALERT_OF = {"one-is-slow": Problem.STRAGGLER, "explodes": Problem.LOSS_NAN}
"""Alert of each job."""


@pytest.fixture(scope="module")
def planted(jobs: Jobs, data: Path, alerts: Alerts, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Start all runs at once, observed by Prometheus."""
    faults = tmp_path_factory.mktemp("faults")
    # On a busy machine, ranks wait for each other. Steps are so long that this stays a small part of their time.
    bundled(jobs, data, HEALTHY, replicas=2, pace="1.5")
    bundled(jobs, data, "one-is-slow", fault(faults, "1 slow 0.4"), pace="0.2", replicas=2)
    explodes = {"learningRate": 10.0, "weightDecay": 10.0, "warmupSteps": 0}
    bundled(jobs, data, "explodes", trainer={"optimizer": explodes})
    jobs.create("raises", "raise ValueError('no such sample')")
    absent = {"name": "trainer", "image": "concertina/trainer:test", "command": ["pyton", "train.py"]}
    jobs.create("no-command", pod={"containers": [absent]})
    jobs.create("nowhere", "pass", pod={"nodeSelector": {"disk": "absent"}})
    return jobs


@dataclass(frozen=True)
class Asked:
    ready: float
    """Unix time in seconds by which all jobs trained, or had failed."""
    found: Mapping[str, Future[Any]]


@pytest.fixture(scope="module")
def asked(planted: Jobs, shell: Mapping[str, str]) -> Iterator[Asked]:
    """Run all commands at once, because most of their time is waiting."""
    for _, ready in RUNS.values():
        ready(planted)
    at = time.time()
    with ThreadPoolExecutor(len(RUNS) + 1) as beside:
        futures: dict[str, Future[Any]] = {
            section: beside.submit(follow, shell, section, name) for section, (name, _) in RUNS.items()
        }
        futures[HEALTHY] = beside.submit(diagnosed, shell, HEALTHY)
        yield Asked(at, futures)


@pytest.mark.parametrize("section", RUNS)
def test_what_is_planted_is_found(asked: Asked, section: str) -> None:
    asked.found[section].result()


@pytest.mark.parametrize("name", ALERT_OF)
def test_its_alert_fires_and_no_other(asked: Asked, alerts: Alerts, name: str) -> None:
    alerts.wait(name, ALERT_OF[name])


def test_a_healthy_run_of_the_same_length_raises_none(asked: Asked, alerts: Alerts) -> None:
    """The check begins once no rule looks back at the run's start, which is not shortened as the rules are."""
    since = asked.ready + LOOK_BACK
    for name, problem in ALERT_OF.items():
        alerts.wait(name, problem)
    until(lambda: alerts.judged(HEALTHY, since) > 10, "something to judge it by")
    assert not alerts.raised(HEALTHY, since) | alerts.firing(HEALTHY)


def test_what_was_seen_of_a_healthy_run_is_told(asked: Asked) -> None:
    healthy = asked.found[HEALTHY].result()
    assert problems(healthy) == []
    assert any(sentence.startswith("time of the last ") for sentence in healthy["saw"])
    assert "agents asked: 2" in healthy["saw"]
