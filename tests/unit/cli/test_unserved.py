"""Job that no operator serves: the status of the job itself shows that."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from concertina.api.accounting import Goodput
from concertina.api.status import Condition, JobStatus, rfc3339
from concertina.kube.resources import Raw
from concertina.terminal import show, unserved

NOW = 1_800_000_000.0


def condition(type: str, true: bool) -> Condition:
    return Condition(
        type=type, status="True" if true else "False", reason="Training", message="", last_transition_time=rfc3339(NOW)
    )


def status(running: bool = False, ended: bool = False, **fields: Any) -> JobStatus:
    kinds = (condition("Ready", True), condition("Running", running), condition("Complete", ended))
    return JobStatus(conditions=kinds, **fields)


def job(created: float = 3600.0, changed: float = 3600.0, **meta: Any) -> Raw:
    """Return a job with these seconds since its creation and its last change; its status was written just now."""
    fields = [
        {"manager": "kubectl", "time": rfc3339(NOW - changed)},
        {"manager": "concertina", "subresource": "status", "time": rfc3339(NOW)},
    ]
    named = {"namespace": "team", "name": "a", "creationTimestamp": rfc3339(NOW - created)}
    return {"metadata": {**named, "generation": 1, "managedFields": fields, **meta}, "spec": {"replicas": 2}}


SEEN = {"observed_generation": 1}


@pytest.mark.parametrize(
    ("raw", "seen", "evidence"),
    [
        (job(created=10), JobStatus(), ""),
        (job(created=40), JobStatus(), "no operator has processed this job for 40s"),
        (job(), status(**SEEN), ""),
        (job(generation=2, changed=5), status(**SEEN), ""),
        (job(generation=2, changed=40), status(**SEEN), "no operator has processed the change of 40s ago"),
        (job(generation=2), status(ended=True, **SEEN), ""),
        (job(generation=2, deletionTimestamp=rfc3339(NOW)), status(**SEEN), ""),
        (job(), status(running=True, goodput=Goodput(at=rfc3339(NOW - 90)), **SEEN), ""),
        (job(), status(running=True, goodput=Goodput(at=rfc3339(NOW - 600)), **SEEN), "no operator has written its"),
        (job(), status(running=False, goodput=Goodput(at=rfc3339(NOW - 600)), **SEEN), ""),
    ],
    ids=[
        "just created",
        "never seen",
        "seen",
        "just changed",
        "a change that nobody saw",
        "that has ended",
        "that is being deleted",
        "trains",
        "trains, and nobody counts",
        "is suspended for long",
    ],
)
def test_by_what_a_job_is_known_to_be_served_by_nobody(raw: Raw, seen: JobStatus, evidence: str) -> None:
    sentence = unserved.sentence(raw, seen, NOW)
    assert bool(sentence) == bool(evidence)
    assert sentence.startswith(evidence)
    assert "namespace team" in sentence or not evidence


def test_the_screen_and_the_table_say_so() -> None:
    raw = {**job(creationTimestamp="2026-01-01T00:00:00Z"), "status": {}}
    console = Console(width=300)
    with console.capture() as captured:
        console.print(show.detail(raw))
        console.print(show.table([raw], with_namespace=False))
    screen, table = captured.get().split("Name ", 1)
    assert "Unserved  no operator has processed this job" in screen
    assert "watchNamespaces" in screen
    assert "Next" not in screen
    assert "Unserved" in table


def test_a_job_of_another_controller_is_said_to_be_left_to_it() -> None:
    raw = job(created=40)
    raw["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert unserved.sentence(raw, JobStatus(), NOW) == ""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(show.detail(raw))
    assert "kueue.x-k8s.io/multikueue (spec.managedBy), so concertina's operator leaves it alone" in captured.get()
