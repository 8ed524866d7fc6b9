"""Recordings of the real Kueue's answers: facts that every stand-in and the operator may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from builders.cluster.kueue_scenarios import SCENARIOS, recorded

Object = dict[str, Any]
QUOTA = 4
"""Quota of the single queue, and of both queues of the cohort together."""
NAMES = [scenario.__name__ for scenario in SCENARIOS]


def states(steps: list[Object]) -> Iterator[dict[str, Object]]:
    """Yield the newest state of each Workload after each answer."""
    newest: dict[str, Object] = {}
    for step in steps:
        for answer in step["answers"]:
            if "deleted" in answer:
                newest.pop(answer["deleted"], None)
            else:
                newest[answer["workload"]] = answer
            yield dict(newest)


def replaced(steps: list[Object]) -> dict[str, str]:
    """Return the first slice of each chain, by the name of a later one."""
    annotation = "kueue.x-k8s.io/workload-slice-name"
    created = [step["write"] for step in steps if step["write"]["method"] == "POST"]
    annotations = {write["workload"]: write["body"]["metadata"].get("annotations", {}) for write in created}
    return {name: value[annotation] for name, value in annotations.items() if annotation in value}


def reserved(state: Object) -> int:
    """Return what Kueue counts for a Workload, each of whose pods requests one cpu."""
    if state["conditions"].get("Finished", {}).get("status") == "True" or not state["active"]:
        return 0
    return sum(min(entry["count"], state["counts"][name]) for name, entry in state["admission"].items())


def test_all_scenarios_are_recorded_from_the_pinned_version() -> None:
    assert sorted(recorded()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_quota_is_reserved_twice(name: str) -> None:
    """Of a slice and the Workload that it replaces, the larger one counts until the latter is finished."""
    steps = recorded()[name]
    first = replaced(steps)
    most = 0
    for newest in states(steps):
        jobs: dict[str, int] = {}
        for workload, state in newest.items():
            job = first.get(workload, workload)
            jobs[job] = max(jobs.get(job, 0), reserved(state))
        assert sum(jobs.values()) <= QUOTA, newest
        most = max([most, *jobs.values()])
    assert most > 0
