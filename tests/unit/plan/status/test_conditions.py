"""Conditions as tools read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from concertina.api.spec import template_outdated
from concertina.api.status import Condition, ConditionType, JobStatus
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.plan import plan
from concertina.plan.status.conditions import MOST
from concertina_protocol import State, Storage, StorageHealth

NOW = jobs.T0 + 60
RUNNING = jobs.running(jobs.spec())


def kstatus(status: JobStatus, generation: int) -> str:
    """Return the status by the generic rules of kstatus (cli-utils, pkg/kstatus/status), which Flux uses.

    The first condition that decides counts.
    """
    if status.observed_generation != generation:
        return "InProgress"
    for condition in status.conditions:
        if condition.status == "True" and condition.type == "Reconciling":
            return "InProgress"
        if condition.status == "True" and condition.type == "Stalled":
            return "Failed"
    return "Current" if status.is_true(ConditionType.READY) else "InProgress"


def changed(**fields: Any) -> JobObservation:
    """Return the job that trains, just after its spec was changed."""
    return replace(RUNNING, job=replace(RUNNING.job, spec=jobs.spec(**fields), generation=2))


def coordinator_says(seen: JobObservation, **fields: Any) -> JobObservation:
    coordinator = seen.agents["demo-0-0"]
    assert coordinator.report is not None
    return replace(
        seen, agents={**seen.agents, "demo-0-0": replace(coordinator, report=replace(coordinator.report, **fields))}
    )


FAILED_POD = replace(RUNNING.pods[1], phase=PodPhase.FAILED, exit_code=1, exit_reason="Error")
REFUSES = Storage(StorageHealth.ERROR, None, "403")
CASES = {
    "trains": (RUNNING, "Current", True, True, False),
    "is to stop": (changed(suspend=True), "InProgress", False, True, True),
    "has stopped, with its pods": (
        coordinator_says(changed(suspend=True), state=State.DRAINED), "InProgress", False, False, True,
    ),
    "is to shrink": (changed(replicas=2), "InProgress", False, True, True),
    "is to grow": (changed(replicas=5), "InProgress", False, True, True),
    "lost all pods": (replace(RUNNING, pods=(), agents={}), "InProgress", False, False, True),
    "lost a replica": (
        replace(RUNNING, pods=(RUNNING.pods[0], FAILED_POD, RUNNING.pods[2])), "InProgress", False, False, True,
    ),
    "is suspended": (jobs.observed(jobs.job(jobs.spec(suspend=True))), "Current", True, False, False),
    "trains without its store": (coordinator_says(RUNNING, storage=REFUSES), "Current", True, True, False),
    "has no valid size": (
        jobs.observed(replace(jobs.job(None), spec_error="spec.replicas is odd")), "Failed", False, False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ready_running_and_reconciling_follow_kstatus(case: str) -> None:
    seen, expected, ready, running, reconciling = CASES[case]
    status = plan(seen, NOW).status
    assert kstatus(status, seen.job.generation) == expected
    assert status.is_true(ConditionType.READY) is ready
    assert status.is_true(ConditionType.RUNNING) is running
    assert status.is_true(ConditionType.RECONCILING) is reconciling


def test_a_world_that_is_too_small_trains_and_says_what_it_lacks() -> None:
    status = plan(changed(replicas=5), NOW).status
    reconciling = status.condition(ConditionType.RECONCILING)
    assert reconciling is not None
    assert (reconciling.reason, reconciling.message) == ("ReplicasMissing", "3 of 5 replicas train in round 1")


def test_trouble_in_spite_of_which_training_goes_on_is_degraded() -> None:
    status = plan(coordinator_says(RUNNING, storage=REFUSES), NOW).status
    trouble = status.trouble
    assert trouble is not None
    assert (trouble.type, trouble.reason) == ("Degraded", "StorageUnavailable")
    assert trouble.message == "training continues, but no checkpoint can be written: 403"
    assert not status.is_true(ConditionType.STALLED)
    assert plan(RUNNING, NOW).status.trouble is None


def test_a_newer_api_server_is_told_of_while_it_is_newer() -> None:
    newer = replace(RUNNING, template_outdated=template_outdated((1, 37)))
    status = plan(newer, NOW).status
    outdated = status.condition(ConditionType.TEMPLATE_OUTDATED)
    assert outdated is not None
    assert (outdated.status, outdated.reason) == ("True", "KubernetesIsNewer")
    assert "the fields of Kubernetes 1.36, and the API server is 1.37" in outdated.message
    assert status.is_true(ConditionType.READY)
    upgraded = plan(jobs.then(newer, plan(newer, NOW), template_outdated=template_outdated((1, 36))), NOW + 1).status
    assert upgraded.condition(ConditionType.TEMPLATE_OUTDATED) is None


def test_conditions_of_other_controllers_stay_and_those_of_a_failed_pass_go() -> None:
    def foreign(kind: str) -> Condition:
        return Condition(type=kind, status="True", reason="ByAdmin", last_transition_time="2026-01-01T00:00:00Z")

    others = tuple(foreign(f"example.com/{name}") for name in ("Approved", "Billed"))
    status = RUNNING.job.status
    mixed = (others[0], *status.conditions, foreign("ReconcileError"), others[1])
    seen = replace(RUNNING, job=replace(RUNNING.job, status=status.model_copy(update={"conditions": mixed})))
    found = plan(seen, NOW).status.conditions
    assert found[-2:] == others
    assert [condition.type for condition in found[:-2]] == [condition.type for condition in status.conditions]

    crowd = tuple(foreign(f"example.com/{number}") for number in range(MOST))
    full = status.model_copy(update={"conditions": crowd})
    seen = replace(RUNNING, job=replace(RUNNING.job, status=full))
    assert len(plan(seen, NOW).status.conditions) == MOST, "more would have the whole status refused"


def test_a_condition_appears_when_it_is_first_true_and_stays() -> None:
    status = plan(RUNNING, NOW).status
    always = [ConditionType.READY, ConditionType.RECONCILING, ConditionType.RUNNING]
    assert [condition.type for condition in status.conditions] == always
    refused = replace(jobs.job(None), spec_error="spec.replicas is odd", status=status)
    status = plan(jobs.observed(refused), NOW).status
    assert status.true_condition(ConditionType.STALLED)
    status = plan(replace(RUNNING, job=replace(RUNNING.job, status=status)), NOW).status
    stalled = status.condition(ConditionType.STALLED)
    assert stalled
    assert (stalled.status, stalled.reason) == ("False", "NotStalled")
