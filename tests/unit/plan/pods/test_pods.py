"""Pods that are created, replaced and deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.api.internal import Internal
from concertina.api.restarts import AvoidedNode, Restart, Restarts
from concertina.api.status import JobStatus, rfc3339
from concertina.api.world import Claim, World
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import CreateRefusal, JobObservation, NodeView, Refusal
from concertina.plan.plan import plan


def creates(made: Plan) -> list[tuple[int, int]]:
    return [(action.index, action.attempt) for action in made.actions if isinstance(action, CreatePod)]


def deletes(made: Plan) -> dict[str, bool]:
    """Return, by the name of each deleted pod, whether it is forced."""
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
    assert made.status.internal.attempts == ((0, 1) if created else ())


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


@pytest.mark.parametrize("ready", [True, False])
def test_a_successor_that_was_bound_to_a_node_just_dead_is_replaced_in_its_turn(ready: bool) -> None:
    """If many nodes die together, the scheduler learns of some later than of others."""
    pods = (jobs.pod(0), jobs.pod(1, phase="Pending"), jobs.pod(2))
    seen = jobs.observed(jobs.job(jobs.spec()), pods)
    made = plan(replace(seen, nodes={**seen.nodes, "node-1": NodeView("node-1", ready=ready)}), T0 + 1)
    assert creates(made) == ([] if ready else [(1, 1)])
    assert list(deletes(made)) == ([] if ready else ["demo-1-0"])


@pytest.mark.parametrize("change", [{"suspend": True}, {"replicas": 2}, {}], ids=["suspend", "scale", "lost"])
@pytest.mark.parametrize("launcher", ["Agent", "Torchrun"])
@pytest.mark.parametrize("out_of_service", [False, True])
def test_a_command_of_ones_own_is_not_forgotten_while_it_may_run(
    change: dict[str, Any], launcher: str, out_of_service: bool
) -> None:
    """Nothing fences the command's writes: the pod stays until its node reports its end, or is out of service."""
    round = 1 if launcher == "Torchrun" else None
    pods = tuple(jobs.pod(index, round=round) for index in range(3))
    spec = jobs.command_spec(
        launcher=launcher, elastic=None if launcher == "Torchrun" else {"minReplicas": 1}, **change
    )
    world = World(round=1, claim=Claim(round=1, claim_id="a", committed=True), replicas=3) if round else World()
    seen = jobs.observed(jobs.job(spec, JobStatus(world=world)), pods)
    away = NodeView("node-2", ready=False, out_of_service=out_of_service)
    seen = replace(seen, nodes={**seen.nodes, "node-2": away})
    if launcher == "Torchrun" and change != {"suspend": True}:
        store = jobs.pod(None, 1, name="demo-rendezvous-1", round=1, node="node-0")
        seen = replace(seen, pods=(store, *pods), job=replace(seen.job, status=fixed_at(seen, spec.replicas)))
    made = plan(seen, T0 + 1)
    assert deletes(made).get("demo-2-0") in ({True} if out_of_service else {False})
    going = replace(pods[2], deleting=True)
    made = plan(replace(seen, pods=(*seen.pods[:-1], going)), T0 + 1)
    assert deletes(made).get("demo-2-0") is (True if out_of_service else None)
    assert made.status.replicas == 2, "an HPA does not count it"


def fixed_at(seen: JobObservation, replicas: int) -> JobStatus:
    """Return the status with a rendezvous of that fixed size."""
    status = seen.job.status
    return status.model_copy(update={"world": status.world.model_copy(update={"replicas": replicas})})


def test_a_suspension_says_which_nodes_can_not_confirm_it() -> None:
    pods = tuple(jobs.pod(index, deleting=True) for index in range(2))
    seen = jobs.observed(jobs.job(jobs.command_spec(suspend=True)), pods)
    made = plan(replace(seen, nodes={**seen.nodes, "node-1": NodeView("node-1", ready=False)}), T0 + 1)
    ready = made.status.condition("Ready")
    assert ready
    assert ready.reason == "Suspending"
    assert "node-1 can't confirm" in ready.message


def test_a_created_pod_that_is_not_seen_yet_is_created_under_the_same_name() -> None:
    status = JobStatus(internal=Internal(attempts=(0, 1)))
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
        (14, "Running", True, []),
        (15.5, "Running", True, [(1, 1)]),
        (60, "Pending", True, []),
        (15.5, "Running", False, []),
        (10_000, "Running", False, []),
    ],
    ids=["not for long", "for long", "it does not run yet", "nobody can be reached", "nobody, for very long"],
)
def test_a_replica_outside_of_the_round_that_can_not_be_reached_is_replaced(
    since: float, phase: str, others: bool, created: Any
) -> None:
    pods = (jobs.pod(0), jobs.pod(1, phase=phase), jobs.pod(2))
    lost = jobs.agent("demo-1-0", connected=False, lost_at=T0 + 1)
    agents = {"demo-1-0": lost, "demo-0-0": jobs.agent("demo-0-0", connected=others)}
    given_up = frozenset({"pod-1-0"})
    made = plan(jobs.observed(jobs.job(jobs.spec()), pods, agents, given_up=given_up), T0 + 1 + since)
    assert creates(made) == created


def test_a_quota_is_waited_for() -> None:
    sentence = 'pods "demo-2-0" is forbidden: exceeded quota: small'
    pods = (jobs.pod(0), jobs.pod(1))
    seen = jobs.observed(jobs.job(jobs.spec()), pods, refused=CreateRefusal(Refusal.QUOTA, sentence, T0, T0 + 1))
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
    again = entry.model_copy(update={"action": "RecreatePod"})
    bad = AvoidedNode(node="node-1", until=rfc3339(T0 + 900))
    status = JobStatus(restarts=Restarts(in_window=2, total=2, recent=(entry, again)), avoided_nodes=(bad,))
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


def test_the_end_of_a_pod_with_an_earlier_failure_is_counted() -> None:
    pods = (jobs.pod(0), jobs.pod(1, phase="Failed", exit_code=137, exit_reason="OOMKilled"), jobs.pod(2))
    name = pods[1].name
    earlier = Restart(at=rfc3339(T0 - 100), replica=name, reason="WorkerFailed", counted=True)
    lost = Restart(at=rfc3339(T0), replica=name, reason="MemberLost", counted=False)
    status = JobStatus(restarts=Restarts(in_window=1, total=2, recent=(earlier, lost)))
    made = plan(jobs.observed(jobs.job(jobs.spec(), status), pods), T0 + 1)
    assert [entry.counted for entry in made.status.restarts.recent] == [True, True]
    assert (made.status.restarts.in_window, made.status.restarts.total) == (2, 2)


def test_an_evicted_pod_is_not_the_jobs_failure() -> None:
    pods = (jobs.pod(0), jobs.pod(1, phase="Failed", exit_reason="Evicted"), jobs.pod(2))
    made = plan(jobs.observed(jobs.job(jobs.spec()), pods), T0 + 1)
    assert made.status.restarts.total == 0


def crashing(ends: list[tuple[float, str]], **last: Any) -> JobObservation:
    """Return the pods of replica 1 that ended so long after T0, each planned when its end was observed.

    The last pod has these fields.
    """
    seen = jobs.observed(jobs.job(jobs.spec()), (jobs.pod(0), jobs.pod(2)))
    for attempt, (after, reason) in enumerate(ends):
        gone = last if attempt == len(ends) - 1 else {}
        ended = jobs.pod(1, attempt, **{"phase": "Failed", "exit_code": 1, "exit_reason": reason, **gone})
        pods = (seen.pods[0], ended, seen.pods[-1])
        seen = jobs.then(replace(seen, pods=pods), plan(replace(seen, pods=pods), T0 + after))
    return seen


@pytest.mark.parametrize(
    ("ends", "last", "wait"),
    [
        ([(0, "Error")], {}, 0),
        ([(0, "Error"), (1, "StartError")], {}, 0),
        ([(0, "Error"), (1, "StartError"), (2, "Error")], {}, 1),
        ([(0, "Error"), (1, "Error"), (2, "Error"), (4, "Error")], {}, 2),
        ([(i * 40, "Error") for i in range(9)], {}, 30),
        ([(0, "Error"), (1, "Error"), (122, "Error")], {}, 0),
        ([(0, "Error"), (1, "Error"), (2, "Evicted")], {}, 0),
        ([(0, "Evicted"), (1, "Evicted"), (2, "Evicted"), (3, "Evicted")], {}, 0),
        ([(0, "Unknown"), (1, "ContainerStatusUnknown"), (2, "Unknown")], {}, 0),
        ([(0, "Error"), (1, "Error"), (2, "Error")], {"deleting": True}, 0),
        ([(0, "Completed"), (1, "Completed"), (2, "Completed")], {"phase": "Succeeded", "exit_code": 0}, 1),
    ],
    ids=[
        "first",
        "second",
        "third",
        "fourth",
        "at most",
        "far apart",
        "evicted",
        "evictions",
        "reboots",
        "deleted",
        "exit 0",
    ],
)
def test_a_replica_that_ends_by_itself_again_and_again_waits_for_its_next_pod(
    ends: list[tuple[float, str]], last: Any, wait: float
) -> None:
    """The wait follows from the status alone, so a new operator keeps it whatever else happens."""
    seen, now = crashing(ends, **last), T0 + ends[-1][0]
    named = [(1, len(ends))]
    assert creates(plan(seen, now)) == ([] if wait else named)
    if wait:
        early = plan(seen, now + wait - 0.1)
        assert creates(early) == []
        assert early.recheck_after == pytest.approx(0.1, abs=0.001)
        assert f"the next pod of replica 1 waits {wait} s: " in early.status.condition("Running").message
    assert creates(plan(seen, now + wait + 0.01)) == named


def test_the_wait_for_a_next_pod_is_decided_when_the_end_is_seen() -> None:
    """The pass that counts the failure makes no pod, names the reason, and schedules the next pass."""
    seen = crashing([(0, "Error"), (1, "Error")])
    ended = jobs.pod(1, 2, phase="Failed", exit_code=128, exit_reason="StartError")
    made = plan(replace(seen, pods=(seen.pods[0], ended, seen.pods[-1])), T0 + 2)
    assert creates(made) == []
    assert made.status.internal.attempts == (0, 3)
    assert made.status.restarts.in_window == 3
    assert made.recheck_after == pytest.approx(1)
    last = "The last one, demo-1-2, ended with exit code 128 (StartError)"
    sentence = f"waits 1 s: 3 pods in a row ended by themselves. {last}"
    assert sentence in made.status.condition("Running").message


def test_one_replica_that_waits_holds_up_no_other() -> None:
    seen = crashing([(0, "Error"), (1, "Error"), (2, "Error")])
    made = plan(replace(seen, pods=seen.pods[:2]), T0 + 2)
    assert creates(made) == [(2, 0)]


def test_a_round_that_trains_says_why_a_replica_is_missing() -> None:
    entries = tuple(Restart(at=rfc3339(T0 + i), replica=f"demo-2-{i}", reason="Error") for i in range(4))
    seen = jobs.running(jobs.spec(), 2)
    status = seen.job.status.model_copy(
        update={"internal": Internal(attempts=(0, 0, 4)), "restarts": Restarts(recent=entries)}
    )
    made = plan(replace(seen, job=replace(seen.job, status=status)), T0 + 4)
    assert made.status.condition("Ready").reason == "Training"
    assert creates(made) == []
    assert "the next pod of replica 2 waits 2 s: 4 pods in a row" in made.status.condition("Running").message


def test_a_member_that_ended_while_the_next_round_waits_is_one_failure() -> None:
    """The end is observed and counted during the wait.

    The later round neither counts it again nor waits longer for it.
    """
    entries = tuple(
        Restart(at=rfc3339(T0 + 9 + i), replica="demo-0-0", reason="X", step=40, counted=False) for i in (0, 1)
    )
    seen = jobs.running(jobs.spec())
    status = seen.job.status.model_copy(update={"restarts": Restarts(recent=entries, total=2)})
    ended = jobs.pod(1, phase="Failed", exit_code=1, exit_reason="Error")
    pods = (seen.pods[0], ended, seen.pods[2])
    seen = replace(seen, job=replace(seen.job, status=status), pods=pods)
    waits = plan(seen, T0 + 10.5)
    assert (waits.status.world.claim.round, waits.status.restarts.total) == (1, 3)
    assert waits.recheck_after == pytest.approx(0.5)
    answered = plan(jobs.then(seen, waits), T0 + 11.1)
    assert (answered.status.world.claim.round, answered.status.restarts.total) == (2, 3)
    assert answered.status.restarts.in_window == 1


def test_names_that_other_pods_hold_are_passed_over() -> None:
    """The pods belong to an earlier job of that name, and may exist as long as their node is unreachable."""
    taken = frozenset({"demo-0-0", "demo-0-1", "demo-2-0", "demo-7-0"})
    seen = jobs.observed(jobs.job(jobs.spec()), taken=taken)
    made = plan(seen, T0)
    assert creates(made) == [(0, 2), (1, 0), (2, 1)]
    assert made.status.internal.attempts == (2, 0, 1), "in the status before any of them is made"
    pods = (jobs.pod(0, 2), jobs.pod(1), jobs.pod(2, 1, phase="Failed", exit_code=1))
    made = plan(jobs.then(seen, made, pods=pods, taken=taken | {"demo-2-2"}), T0 + 1)
    assert creates(made) == [(2, 3)]
