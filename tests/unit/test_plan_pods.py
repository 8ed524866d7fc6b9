"""Pods that are created, replaced and deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.api.status import JobStatus, Restart, Restarts, rfc3339
from concertina.plan.plan import plan
from concertina.plan.types import CreatePod, DeletePod, NodeView, Plan


def creates(made: Plan) -> list[tuple[int, int]]:
    return [(action.index, action.attempt) for action in made.actions if isinstance(action, CreatePod)]


def deletes(made: Plan) -> dict[str, bool]:
    """Name -> by force."""
    return {action.name: action.force for action in made.actions if isinstance(action, DeletePod)}


@pytest.mark.parametrize(
    ("pod", "created", "deleted"),
    [
        ({}, [], {}),
        ({"phase": "Pending"}, [], {}),
        ({"phase": "Failed", "exit_code": 1}, [(1, 1)], {}),
        ({"phase": "Succeeded", "exit_code": 0}, [(1, 1)], {}),
        ({"deleting": True}, [(1, 1)], {}),
    ],
)
def test_the_dead_get_a_successor(pod: dict[str, Any], created: Any, deleted: Any) -> None:
    pods = (jobs.pod(0), jobs.pod(1, **pod), jobs.pod(2))
    made = plan(jobs.observed(jobs.job(jobs.spec()), pods), T0 + 1)
    assert creates(made) == created
    assert deletes(made) == deleted
    assert made.status.attempts == ((0, 1) if created else ())


@pytest.mark.parametrize(
    ("node", "deleting", "created", "deleted"),
    [
        (NodeView("node-1", ready=True), False, [], {}),
        (NodeView("node-1", ready=False), False, [(1, 1)], {"demo-1-0": True}),
        (NodeView("node-1", ready=False), True, [(1, 1)], {"demo-1-0": True}),
        (NodeView("node-1", ready=True, out_of_service=True), False, [(1, 1)], {"demo-1-0": True}),
    ],
)
def test_a_dead_node_does_not_block_a_successor(node: NodeView, deleting: bool, created: Any, deleted: Any) -> None:
    pods = (jobs.pod(0), jobs.pod(1, deleting=deleting), jobs.pod(2))
    seen = jobs.observed(jobs.job(jobs.spec()), pods)
    made = plan(replace(seen, nodes={**seen.nodes, "node-1": node}), T0 + 1)
    assert creates(made) == created
    assert deletes(made) == deleted


def test_a_created_pod_that_is_not_seen_yet_is_created_under_the_same_name() -> None:
    status = JobStatus(attempts=(0, 1))
    made = plan(jobs.observed(jobs.job(jobs.spec(), status), (jobs.pod(0), jobs.pod(2))), T0 + 1)
    assert creates(made) == [(1, 1)]


def test_a_member_whose_pod_vanished_gets_a_new_name() -> None:
    seen = jobs.running(jobs.spec())
    made = plan(replace(seen, pods=seen.pods[:1] + seen.pods[2:]), T0 + 11)
    assert creates(made) == [(1, 1)]
    assert made.status.world.claim.round == 2


@pytest.mark.parametrize(
    ("since", "phase", "others", "created"),
    [
        (1, "Running", True, []),
        (3.5, "Running", True, [(1, 1)]),
        (60, "Pending", True, []),
        (3.5, "Running", False, []),
        (31, "Running", False, [(1, 1)]),
    ],
    ids=["not for long", "for long", "it does not run yet", "nobody can be reached", "nobody, for very long"],
)
def test_a_replica_outside_of_the_round_that_can_not_be_reached_is_replaced(
    since: float, phase: str, others: bool, created: Any
) -> None:
    pods = (jobs.pod(0), jobs.pod(1, phase=phase), jobs.pod(2))
    lost = jobs.agent("demo-1-0", connected=False, lost_at=T0 + 1)
    agents = {"demo-1-0": lost, "demo-0-0": jobs.agent("demo-0-0", connected=others)}
    made = plan(jobs.observed(jobs.job(jobs.spec()), pods, agents), T0 + 1 + since)
    assert creates(made) == created


def test_a_quota_is_waited_for() -> None:
    sentence = 'pods "demo-2-0" is forbidden: exceeded quota: small'
    pods = (jobs.pod(0), jobs.pod(1))
    seen = jobs.observed(jobs.job(jobs.spec()), pods, create_error=sentence, create_error_at=T0 + 1)
    made = plan(seen, T0 + 2)
    assert creates(made) == []
    assert made.recheck_after is not None
    assert made.recheck_after <= 4
    assert sentence in made.status.condition("Running").message
    assert creates(plan(seen, T0 + 7)) == [(2, 0)]


def test_scaling_down_keeps_members_and_deletes_only_after_a_round_without_them() -> None:
    seen = jobs.running(jobs.spec())
    seen = replace(seen, job=replace(seen.job, spec=jobs.spec(replicas=2)))
    made = plan(seen, T0 + 20)
    assert deletes(made) == {}
    assert made.status.condition("Ready").reason == "Draining"
    outside = jobs.observed(jobs.job(jobs.spec(replicas=2)), tuple(jobs.pod(index) for index in range(4)))
    assert deletes(plan(outside, T0 + 1)) == {"demo-2-0": False, "demo-3-0": False}


def test_a_replica_that_fails_twice_is_replaced_elsewhere() -> None:
    entry = Restart(at=rfc3339(T0), replica="demo-1-0", node="node-1", reason="WorkerFailed")
    status = JobStatus(restarts=Restarts(in_window=2, total=2, recent=(entry, entry)))
    pods = (jobs.pod(0), jobs.pod(1), jobs.pod(2))
    made = plan(jobs.observed(jobs.job(jobs.spec(), status), pods), T0 + 1)
    assert deletes(made) == {"demo-1-0": False}
    assert [action for action in made.actions if isinstance(action, CreatePod)] == [CreatePod(1, 1, ("node-1",))]


def test_a_pod_that_ended_by_itself_is_counted_once_and_keeps_its_logs() -> None:
    pods = (jobs.pod(0), jobs.pod(1, phase="Failed", exit_code=137, exit_reason="OOMKilled"), jobs.pod(2))
    seen = jobs.observed(jobs.job(jobs.spec()), pods)
    made = plan(seen, T0 + 1)
    assert [(entry.reason, entry.counted) for entry in made.status.restarts.recent] == [("OOMKilled", True)]
    again = plan(jobs.then(seen, made), T0 + 2)
    assert again.status.restarts.total == 1
    assert deletes(again) == {}


def test_an_evicted_pod_is_not_the_jobs_failure() -> None:
    pods = (jobs.pod(0), jobs.pod(1, phase="Failed", exit_reason="Evicted"), jobs.pod(2))
    made = plan(jobs.observed(jobs.job(jobs.spec()), pods), T0 + 1)
    assert made.status.restarts.total == 0
