"""Replicas that do not start while others do."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.facts import constants
from concertina.plan.observed import AgentView, JobObservation, NodeView
from concertina.plan.plan import plan

PULL: dict[str, Any] = {"phase": "Pending", "ip": "", "waiting": "ImagePullBackOff", "waiting_message": "no such tag"}
SILENT: dict[str, Any] = {"connected": False, "report": None, "ready_at": None, "wanted_at": T0 + 20}
BROKEN: dict[str, Any] = {
    "ready_at": None,
    "report": jobs.report("demo-2-0", ready=False, startup_error="torch can't be imported: no module named torch"),
}


def two_train(pod: dict[str, Any], view: dict[str, Any] | None, nodes: int = 6) -> JobObservation:
    """Return a job in which two replicas train, and replica 2 exists outside of the round."""
    seen = jobs.running(jobs.spec(), 2)
    agents = dict(seen.agents)
    if view is not None:
        agents["demo-2-0"] = jobs.agent("demo-2-0", **view)
    there = {f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(nodes)}
    return replace(seen, pods=(*seen.pods, jobs.pod(2, **pod)), agents=agents, nodes=there)


def answered(seen: JobObservation, now: float) -> tuple[Plan, Plan]:
    """Return the plans of the pass that observes it, and of the next pass."""
    made = plan(seen, now)
    return made, plan(jobs.then(seen, made), now + 0.1)


@pytest.mark.parametrize(
    ("pod", "view", "after", "reason"),
    [
        (PULL, None, 50, ""),
        (PULL, None, 61, "ImageUnavailable"),
        ({}, SILENT, 130, ""),
        ({}, SILENT, 141, "AgentNeverStarted"),
        ({}, BROKEN, 21, "AgentCannotStart"),
        ({"phase": "Pending", "ip": "", "waiting": "ContainerCreating"}, None, 3000, ""),
    ],
    ids=["an image, not for long", "an image", "an agent, not for long", "an agent", "broken", "slow, no more"],
)
def test_a_replica_that_does_not_get_to_start_is_replaced_elsewhere(
    pod: dict[str, Any], view: dict[str, Any] | None, after: float, reason: str
) -> None:
    made, then = answered(two_train(pod, view), T0 + after)
    assert [each.reason for each in made.status.restarts.recent] == ([reason] if reason else [])
    assert made.status.restarts.in_window == 0, "it is not the job's failure"
    creates = [action for action in then.actions if isinstance(action, CreatePod)]
    deletes = [action.name for action in then.actions if isinstance(action, DeletePod)]
    if not reason:
        assert (creates, deletes) == ([], [])
        return
    assert deletes == ["demo-2-0"]
    assert [(create.index, create.attempt) for create in creates] == [(2, 1)]
    assert creates[0].never_nodes == ("node-2",)
    assert [event.reason for event in made.events if event.reason == "NodeAvoided"] == ["NodeAvoided"]
    assert made.status.condition("Ready").reason == "Training"


@pytest.mark.parametrize(("pod", "view", "replaced"), [(PULL, None, False), ({}, BROKEN, False), ({}, SILENT, True)])
def test_without_a_node_to_spare_only_what_a_new_pod_can_mend_is_replaced(
    pod: dict[str, Any], view: dict[str, Any] | None, replaced: bool
) -> None:
    made, then = answered(two_train(pod, view, nodes=3), T0 + 200)
    assert bool([action for action in then.actions if isinstance(action, DeletePod)]) == replaced
    assert made.status.condition("Ready").reason == "Training"


def test_where_nobody_has_started_no_replica_is_to_blame() -> None:
    pods = tuple(jobs.pod(index, **PULL) for index in range(3))
    seen = jobs.observed(jobs.job(jobs.spec()), pods)
    there = {f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(9)}
    made, then = answered(replace(seen, nodes=there), T0 + 200)
    assert made.status.restarts.recent == ()
    assert not [action for action in then.actions if isinstance(action, DeletePod)]
    assert made.status.condition("Stalled").reason == "ImageUnavailable"


def test_an_operator_that_reaches_nobody_blames_no_replica() -> None:
    seen = two_train({}, SILENT)
    agents = {name: replace(view, connected=False, wanted_at=T0 + 20) for name, view in seen.agents.items()}
    assert plan(replace(seen, agents=agents), T0 + 141).status.restarts.recent == ()


def test_it_is_counted_once_and_the_next_one_on_another_node_again() -> None:
    seen = two_train(PULL, None)
    made, _ = answered(seen, T0 + 61)
    gone = jobs.then(seen, made, pods=(*seen.pods[:2], replace(seen.pods[2], deleting=True)))
    assert len(plan(gone, T0 + 62).status.restarts.recent) == 1
    second = jobs.pod(2, 1, **PULL, node="node-3", created=T0 + 62)
    made = plan(jobs.then(gone, made, pods=(*seen.pods[:2], second)), T0 + 123)
    assert [each.node for each in made.status.restarts.recent] == ["node-2", "node-3"]


def test_a_round_that_goes_on_without_a_replica_says_why() -> None:
    message = plan(two_train(PULL, None), T0 + 20).status.condition("Running").message
    assert "2 of 3 replicas train" in message
    assert "demo-2-0 does not start on node node-2: ImagePullBackOff (no such tag)" in message
    unknown = two_train({"phase": "Pending", "ip": "", "node": ""}, AgentView().__dict__)
    assert "does not start" not in plan(unknown, T0 + 20).status.condition("Running").message


CUT_OFF = "demo-1-0"


def cut_off(minimum: int, nodes: int, seconds: float) -> tuple[JobObservation, float]:
    """Return a job of three whose replica 1 the others can't reach after so long, and the time."""
    pods = tuple(jobs.pod(index) for index in range(3))
    seen = jobs.observed(
        jobs.job(jobs.spec(elastic={"minReplicas": minimum})), pods, {pod.name: jobs.agent(pod.name) for pod in pods}
    )
    seen = replace(seen, nodes={f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(nodes)})
    now = T0
    while now < T0 + seconds:
        made = plan(replace(seen, fresh_claim=f"claim-{now}"), now)
        agents = dict(seen.agents)
        for name, message in jobs.sends(made, protocol.Prepare).items():
            sees = tuple(pod.name for pod in pods if (name == CUT_OFF) == (pod.name == CUT_OFF))
            reply = jobs.prepared(name, message, reachable=sees)
            agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=reply)
        seen, now = jobs.then(seen, made, agents=agents), now + 0.5
        if seen.job.status.restarts.recent:
            break
    return seen, now


def test_a_replica_that_the_others_can_not_reach_is_replaced_elsewhere_where_they_need_it() -> None:
    seen, now = cut_off(minimum=3, nodes=6, seconds=60)
    assert [(each.replica, each.reason) for each in seen.job.status.restarts.recent] == [(CUT_OFF, "NetworkPartition")]
    made = plan(seen, now)
    assert [action.name for action in made.actions if isinstance(action, DeletePod)] == [CUT_OFF]
    created = [action for action in made.actions if isinstance(action, CreatePod)]
    assert [(each.index, each.attempt, each.never_nodes) for each in created] == [(1, 1, ("node-1",))]


def test_who_came_after_the_others_were_asked_is_not_cut_off_but_asked_about() -> None:
    """The other answers can't name it, however many earlier claims have failed."""
    seen, now = cut_off(minimum=3, nodes=6, seconds=60)
    made = plan(seen, now)
    new = jobs.pod(1, 1, node="node-4", created=now)
    pods = (seen.pods[0], new, seen.pods[2])
    agents = {**seen.agents, new.name: jobs.agent(new.name)}
    seen = jobs.then(replace(seen, pods=pods, agents=agents), made)
    asked = jobs.sends(plan(seen, now), protocol.Prepare)
    assert set(asked) == {new.name}
    reply = jobs.prepared(new.name, asked[new.name], reachable=tuple(pod.name for pod in pods))
    agents[new.name] = jobs.called(agents[new.name], asked[new.name], now, done_at=now, reply=reply)
    seen = replace(seen, agents=agents)
    made = plan(seen, now)
    assert made.status.restarts == seen.job.status.restarts
    assert jobs.sends(made, protocol.Prepare) == {}
    now += constants.RETRY
    asked = jobs.sends(plan(seen, now), protocol.Prepare)
    assert {name: [c.replica for c in message.candidates] for name, message in asked.items()} == {
        pod.name: [each.name for each in pods] for pod in (pods[0], pods[2])
    }
    for name, message in asked.items():
        agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=jobs.prepared(name, message))
    made = plan(replace(seen, agents=agents), now)
    assert [member.replica for member in made.status.world.members] == ["demo-0-0", new.name, "demo-2-0"]


@pytest.mark.parametrize(("minimum", "nodes"), [(2, 6), (3, 3)], ids=["the others go on", "no node to spare"])
def test_it_is_left_alone_where_that_would_not_help(minimum: int, nodes: int) -> None:
    seen, _ = cut_off(minimum, nodes, seconds=60)
    assert seen.job.status.restarts.recent == ()


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_pod_that_no_node_can_hold_says_so(gpus: int) -> None:
    waits = {"phase": "Pending", "ip": "", "node": "", "waiting": "Unschedulable", "waiting_message": "6 Insufficient"}
    seen = two_train({**waits, "requests": {"cpu": Decimal(1), "nvidia.com/gpu": Decimal(gpus)}}, None)
    offers = {"cpu": Decimal(8), "nvidia.com/gpu": Decimal(2)}
    seen = replace(seen, nodes={name: replace(node, allocatable=offers) for name, node in seen.nodes.items()})
    message = plan(seen, T0 + 20).status.condition("Running").message
    too_large = "demo-2-0 does not start: the pod requests 4 nvidia.com/gpu, and no node has more than 2"
    assert (too_large in message) is (gpus == 4), message
    assert ("Unschedulable (6 Insufficient)" in message) is (gpus == 1), message
    begins = replace(seen, pods=seen.pods[2:], agents={}, job=jobs.job(jobs.spec()))
    message = plan(begins, T0 + 20).status.condition("Ready").message
    assert (too_large.partition("start: ")[2] in message) is (gpus == 4), message
