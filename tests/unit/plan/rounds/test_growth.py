"""Standby replicas and growth: which replicas join and when, and how failures of joining delay it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.internal import Internal
from concertina.api.status import rfc3339
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

SPARE = jobs.spec(elastic={"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 5}, "standbyReplicas": 1})
FIXED = jobs.spec(elastic={"standbyReplicas": 1})


def with_pod(
    seen: JobObservation, index: int, attempt: int = 0, ready: bool = True, at: float = T0 + 10
) -> JobObservation:
    """Return the observation with one more running replica, whose agent is ready or not."""
    pod = jobs.pod(index, attempt)
    view = jobs.agent(pod.name, ready_at=at, report=jobs.report(pod.name, ready=ready))
    pods = tuple(sorted((*seen.pods, pod), key=lambda pod: (pod.index, pod.attempt)))
    return replace(seen, pods=pods, agents={**seen.agents, pod.name: view})


def without(seen: JobObservation, index: int) -> JobObservation:
    """Return the observation without the pod of that index."""
    name = f"demo-{index}-0"
    pods = tuple(pod for pod in seen.pods if pod.name != name)
    return replace(seen, pods=pods, agents={key: view for key, view in seen.agents.items() if key != name})


def asked(made: Plan) -> set[str]:
    return set(jobs.sends(made, protocol.Prepare))


def answered(seen: JobObservation, made: Plan, now: float, absent: tuple[str, ...] = ()) -> JobObservation:
    """Return the observation after all replicas have answered the plan's Prepares (or Assigns)."""
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        if name not in absent:
            agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=jobs.prepared(name, message))
    for name, message in jobs.sends(made, protocol.Assign).items():
        reply = protocol.Accepted(message.round, message.claim)
        agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=reply)
    return jobs.then(seen, made, agents=agents)


def reported(seen: JobObservation, round: int, state: str = "running", **fields: Any) -> JobObservation:
    """Return the observation with the coordinator's report of a round under claim-<round>."""
    coordinator = seen.job.status.world.members[0].replica
    claim = seen.job.status.world.claim
    assert claim is not None
    report = replace(
        jobs.coordinator_report(**fields), replica=coordinator, round=round, claim=claim.claim_id, state=state
    )
    view = replace(seen.agents[coordinator], report=replace(report, instance=f"i-{coordinator}"))
    return replace(seen, agents={**seen.agents, coordinator: view})


def new_round(seen: JobObservation, made: Plan, now: float, claim: str) -> JobObservation:
    """Continue from the plan that claims to a round that trains."""
    seen = replace(answered(seen, made, now), fresh_claim=claim)
    made = plan(seen, now)
    assert made.status.world.round == made.status.world.claim.round
    seen = answered(seen, made, now)
    return reported(seen, made.status.world.round)


# --- standby replicas


@pytest.mark.parametrize("spec", [SPARE, FIXED], ids=["elastic", "fixed size"])
def test_spares_are_created_beside_the_replicas(spec: Any) -> None:
    made = plan(jobs.observed(jobs.job(spec)), T0)
    creates = [(action.index, action.standby) for action in made.actions if isinstance(action, CreatePod)]
    assert creates == [(0, False), (1, False), (2, False), (3, True)]


@pytest.mark.parametrize("spec", [SPARE, FIXED], ids=["elastic", "fixed size"])
def test_a_spare_takes_the_place_of_a_lost_member_at_once_and_gets_a_successor(spec: Any) -> None:
    seen = with_pod(jobs.running(spec), 3)
    steady = plan(seen, T0 + 11)
    assert steady.status.standby_replicas.names == ("demo-3-0",)
    assert steady.status.standby_replicas.ready == 1
    assert steady.status.replicas == 3, "standby replicas are not replicas: an HPA would take them for such"
    assert steady.status.condition("Ready").reason == "Training"
    seen = jobs.then(without(seen, 1), steady)
    made = plan(seen, T0 + 12)
    assert made.status.world.claim.round == 2
    assert asked(made) == {"demo-0-0", "demo-2-0", "demo-3-0"}
    assert [(a.index, a.attempt, a.standby) for a in made.actions if isinstance(a, CreatePod)] == [(1, 1, True)]
    seen = answered(seen, made, T0 + 12)
    made = plan(seen, T0 + 12)
    assert {member.replica for member in made.status.world.members} == {"demo-0-0", "demo-2-0", "demo-3-0"}
    # The successor is ready and becomes a standby: nothing is drained for it.
    seen = with_pod(reported(answered(seen, made, T0 + 12), 2), 1, 1, at=T0 + 13)
    made = plan(seen, T0 + 100)
    assert made.status.condition("Ready").reason == "Training"
    assert made.status.standby_replicas.names == ("demo-1-1",)


def test_a_spare_that_is_slow_to_answer_is_not_waited_for() -> None:
    seen = with_pod(jobs.running(SPARE), 3)
    report = replace(jobs.coordinator_report(), failures=(protocol.Failure("demo-1-0", "WorkerFailed", "x", at=T0),))
    seen = replace(seen, agents={**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], report=report)})
    made = plan(seen, T0 + 11)
    seen = answered(seen, made, T0 + 11, absent=("demo-3-0",))
    assert plan(seen, T0 + 11).status.world.round == 2


def test_a_first_round_starts_with_whoever_is_ready_first() -> None:
    seen = jobs.observed(jobs.job(FIXED))
    for index, ready in enumerate((True, False, True, True)):
        seen = with_pod(seen, index, ready=ready)
    made = plan(seen, T0 + 11)
    assert asked(made) == {"demo-0-0", "demo-2-0", "demo-3-0"}


def test_scaling_down_keeps_as_many_spares() -> None:
    seen = with_pod(jobs.running(SPARE), 3)
    smaller = SPARE.model_copy(update={"replicas": 2})
    seen = replace(seen, job=replace(seen.job, spec=smaller))
    made = plan(seen, T0 + 20)
    assert made.status.condition("Ready").reason == "Draining"
    assert [action.name for action in made.actions if isinstance(action, DeletePod)] == ["demo-3-0"]
    made = plan(reported(jobs.then(seen, made), 1, state="drained"), T0 + 21)
    seen = answered(jobs.then(seen, made), made, T0 + 21)
    made = plan(seen, T0 + 21)
    assert [member.replica for member in made.status.world.members] == ["demo-0-0", "demo-1-0"]
    assert made.status.standby_replicas.names == ("demo-2-0",)


def test_a_world_that_is_short_takes_a_spare_before_a_quiet_time_is_over_only_where_something_failed() -> None:
    seen = jobs.running(SPARE, count=2)
    made = plan(with_pod(seen, 2, at=T0 + 10), T0 + 12)
    assert made.status.condition("Ready").reason == "Training"
    assert made.recheck_after == pytest.approx(3.0)
    assert plan(with_pod(seen, 2, at=T0 + 10), T0 + 15).status.condition("Ready").reason == "Draining"


# --- growing, and how failures slow it down


def two_and_a_joiner() -> JobObservation:
    return with_pod(jobs.running(jobs.spec(), count=2), 2)


def grown(seen: JobObservation, now: float, claim: str) -> JobObservation:
    """Return the observation in which the replica has joined."""
    made = plan(seen, now)
    assert made.status.condition("Ready").reason == "Draining"
    seen = reported(jobs.then(seen, made), seen.job.status.world.round, state="drained")
    made = plan(seen, now)
    assert made.status.world.claim.reason == "Growing"
    return new_round(seen, made, now, claim)


def test_who_joined_is_remembered() -> None:
    seen = grown(two_and_a_joiner(), T0 + 20, "claim-c")
    growth = seen.job.status.internal.growth
    assert (growth.round, growth.joined, growth.failures) == (2, ("demo-2-0",), 0)


def lost_after(seconds: float, index: int = 2) -> Plan:
    seen = grown(two_and_a_joiner(), T0 + 20, "claim-c")
    return plan(without(seen, index), T0 + 20 + seconds)


@pytest.mark.parametrize(
    ("seconds", "index", "failures"),
    [(3.0, 2, 1), (29.0, 2, 1), (31.0, 2, 0), (3.0, 1, 0)],
    ids=["soon", "still soon", "late", "another member"],
)
def test_a_joiner_that_is_soon_lost_again_counts(seconds: float, index: int, failures: int) -> None:
    made = lost_after(seconds, index)
    assert made.status.world.claim.round == 3
    assert made.status.internal.growth.failures == failures
    if failures:
        assert "replica demo-2-0, which joined in round 2, was lost" in made.status.internal.growth.message


def test_growing_waits_after_a_failure_and_says_so() -> None:
    seen = without(grown(two_and_a_joiner(), T0 + 20, "claim-c"), 2)
    made = plan(seen, T0 + 23)
    seen = new_round(replace(seen, fresh_claim="claim-d"), made, T0 + 23, "claim-e")
    seen = with_pod(seen, 2, 1, at=T0 + 24)
    made = plan(seen, T0 + 30)  # stabilizationWindowSeconds is over, the wait of 2 * 5 s is not
    assert made.status.condition("Ready").reason == "Training"
    assert "growing waits 10 s: replica demo-2-0, which joined" in made.status.condition("Running").message
    assert made.recheck_after == pytest.approx(3.0)
    made = plan(jobs.then(seen, made), T0 + 33)
    assert made.status.condition("Ready").reason == "Draining"


def test_joiners_that_nobody_can_reach_are_not_tried_again_at_once() -> None:
    seen = two_and_a_joiner()
    made = plan(seen, T0 + 20)
    seen = reported(jobs.then(seen, made), 1, state="drained")
    made = plan(seen, T0 + 20)
    agents = dict(answered(seen, made, T0 + 20).agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        reach = ("demo-2-0",) if name == "demo-2-0" else ("demo-0-0", "demo-1-0")
        reply = jobs.prepared(name, message, reachable=reach)
        agents[name] = jobs.called(seen.agents[name], message, T0 + 20, done_at=T0 + 20, reply=reply)
    seen = jobs.then(seen, made, agents=agents, fresh_claim="claim-c")
    made = plan(seen, T0 + 20)
    assert len(made.status.world.members) == 2
    assert made.status.internal.growth.failures == 1
    assert "could not be reached" in made.status.internal.growth.message


@pytest.mark.parametrize(("failures", "ago", "now_failures"), [(1, 60.0, 2), (3, 60.0, 4), (3, 10_000.0, 1)], ids=str)
def test_failures_in_a_row_double_the_wait(failures: int, ago: float, now_failures: int) -> None:
    seen = grown(two_and_a_joiner(), T0 + 20, "claim-c")
    growth = seen.job.status.internal.growth.model_copy(update={"failures": failures, "at": rfc3339(T0 + 23 - ago)})
    status = seen.job.status.model_copy(update={"internal": Internal(growth=growth)})
    seen = replace(seen, job=replace(seen.job, status=status))
    assert plan(without(seen, 2), T0 + 23).status.internal.growth.failures == now_failures


def test_scaling_down_is_no_failure_of_growing() -> None:
    seen = grown(two_and_a_joiner(), T0 + 20, "claim-c")
    seen = replace(seen, job=replace(seen.job, spec=jobs.spec(replicas=2)))
    made = plan(seen, T0 + 22)
    made = plan(reported(jobs.then(seen, made), 2, state="drained"), T0 + 22)
    assert made.status.world.claim.reason == "Shrinking"
    assert made.status.internal.growth.failures == 0
