"""launcher: torchrun: the store first, members within its round, everything anew when the round is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.plan.actions import CreatePod, CreateRendezvous, DeletePod, Plan, Rendezvous
from concertina.plan.observed import Observed, PodPhase
from concertina.plan.plan import plan

ELASTIC = {"minReplicas": 2}


def spec(**fields: Any) -> Any:
    return jobs.command_spec(launcher="torchrun", **fields)


def store(**fields: Any) -> Any:
    return jobs.pod(None, 1, **{"name": "demo-rendezvous-1", "uid": "store", "round": 1, "ip": "127.0.0.9", **fields})


def members(*indexes: int, **fields: Any) -> tuple[Any, ...]:
    return tuple(jobs.pod(index, round=1, **fields) for index in indexes)


def begun(*pods: Any, **fields: Any) -> Observed:
    """In round 1, with these pods."""
    first = jobs.observed(jobs.job(spec(**fields)))
    return jobs.then(first, plan(first, T0), pods=pods)


def reason(made: Plan) -> str:
    ready = made.status.condition("Ready")
    running = made.status.condition("Running")
    assert ready
    assert running
    return f"{ready.reason} {running.reason}"


def of(made: Plan, kind: type[Any]) -> list[Any]:
    return [action for action in made.actions if isinstance(action, kind)]


def test_the_store_comes_first_and_members_are_told_its_address() -> None:
    made = plan(begun(), T0 + 1)
    assert made.status.world.round == 1
    assert list(made.actions) == [CreateRendezvous(1)]
    assert not of(plan(begun(store(phase="Pending", ip="")), T0 + 1), CreatePod)
    made = plan(begun(store()), T0 + 1)
    expected = [CreatePod(index, 0, rendezvous=Rendezvous("127.0.0.9:29400", round=1, least=2)) for index in range(3)]
    assert list(made.actions) == expected, "no Secret: there is no agent"
    assert made.watch == {}


def test_running_says_no_more_than_can_be_known() -> None:
    made = plan(begun(store(), *members(0, 1, 2)), T0 + 5)
    assert reason(made) == "Training TorchrunRuns"
    assert made.actions == ()
    assert made.status.replicas == 3
    assert not made.status.world.members


@pytest.mark.parametrize(
    "end",
    [
        {"phase": "Failed", "exit_code": 137, "exit_reason": "OOMKilled"},
        {"phase": "Failed", "exit_code": 1, "exit_reason": "Evicted"},
        {"deleting": True},
    ],
)
def test_a_member_that_is_killed_is_replaced_within_the_round(end: dict[str, Any]) -> None:
    made = plan(begun(store(), *members(0, **end), *members(1, 2), elastic=ELASTIC), T0 + 5)
    assert made.status.world.round == 1
    assert of(made, CreatePod) == [CreatePod(0, 1, rendezvous=Rendezvous("127.0.0.9:29400", round=1, least=2))]


def test_of_the_pods_of_a_member_that_have_ended_the_newest_stays() -> None:
    ended = (jobs.pod(0, attempt, round=1, phase="Failed", exit_code=137) for attempt in range(3))
    made = plan(begun(store(), *ended, jobs.pod(0, 3, round=1), *members(1, 2), elastic=ELASTIC), T0 + 5)
    assert [action.name for action in of(made, DeletePod)] == ["demo-0-0", "demo-0-1"]


@pytest.mark.parametrize(
    ("pods", "counted"),
    [
        ((store(), *members(0, phase="Failed", exit_code=1, exit_reason="Error"), *members(1, 2)), 1),
        (members(0, 1, 2), 0),
        ((store(phase="Failed", exit_reason="Evicted"), *members(0, 1, 2)), 0),
        ((store(phase="Failed", exit_code=1, exit_reason="Error"), *members(0, 1, 2)), 1),
    ],
    ids=["torchrun gave up", "store gone", "store evicted", "store crashed"],
)
def test_a_round_that_is_over_is_followed_by_another_with_new_pods(pods: tuple[Any, ...], counted: int) -> None:
    seen = begun(*pods, elastic=ELASTIC)
    made = plan(seen, T0 + 5)
    assert made.status.world.round == 2
    assert made.status.restarts.in_window == counted
    after = plan(jobs.then(seen, made), T0 + 6)
    running = {pod.name for pod in pods if pod.phase is PodPhase.RUNNING}
    assert {action.name for action in of(after, DeletePod)} == running
    assert of(after, CreateRendezvous) == [CreateRendezvous(2)]
    assert after.status.restarts.in_window == counted, "once"
    fresh = replace(store(), name="demo-rendezvous-2", uid="store-2", attempt=2, round=2)
    last = plan(jobs.then(seen, after, pods=(fresh, *pods)), T0 + 7)
    assert [(create.attempt, create.rendezvous.round) for create in of(last, CreatePod)] == [(1, 2)] * 3


def test_a_fixed_size_is_changed_by_a_new_round_and_an_elastic_one_is_not() -> None:
    for elastic, round in ((None, 2), (ELASTIC, 1)):
        seen = begun(store(), *members(0, 1, 2), elastic=elastic)
        scaled = replace(seen, job=replace(seen.job, spec=spec(elastic=elastic, replicas=4)))
        made = plan(scaled, T0 + 5)
        assert made.status.world.round == round
        assert made.status.restarts.in_window == 0
    assert [create.index for create in of(made, CreatePod)] == [3]


def test_complete_when_all_have_ended_well_and_nothing_is_replaced_before() -> None:
    ended = members(0, 1, phase="Succeeded", exit_code=0)
    seen = begun(store(), *ended, *members(2), elastic=ELASTIC)
    made = plan(seen, T0 + 5)
    assert not made.actions
    made = plan(replace(seen, pods=(store(), *members(0, 1, 2, phase="Succeeded", exit_code=0))), T0 + 6)
    complete = made.status.condition("Complete")
    assert complete
    assert complete.status == "True"


def test_suspending_deletes_all_and_resuming_makes_a_store_again() -> None:
    seen = begun(store(), *members(0, 1, 2))
    suspended = replace(seen, job=replace(seen.job, spec=spec(suspend=True)))
    made = plan(suspended, T0 + 5)
    assert len(of(made, DeletePod)) == 4
    gone = jobs.then(seen, plan(jobs.then(suspended, made, pods=()), T0 + 6), pods=())
    assert of(plan(replace(gone, job=replace(gone.job, spec=spec())), T0 + 7), CreateRendezvous)


def test_names_that_other_pods_hold_are_passed_over() -> None:
    """The store's is known from its first try alone where the watch doesn't tell of it."""
    seen = jobs.observed(jobs.job(spec()), taken=frozenset({"demo-rendezvous-1"}))
    made = plan(seen, T0)
    assert made.status.world.round == 2
    seen = jobs.then(seen, made, taken=frozenset({"demo-rendezvous-2", "demo-rendezvous-3", "demo-1-0"}))
    made = plan(seen, T0 + 1)
    assert made.status.world.round == 4
    assert made.status.restarts.total == 0
    made = plan(jobs.then(seen, made), T0 + 2)
    assert list(made.actions) == [CreateRendezvous(4)]
    here = store(name="demo-rendezvous-4", round=4)
    made = plan(jobs.then(seen, made, pods=(here,)), T0 + 3)
    assert [(each.index, each.attempt) for each in of(made, CreatePod)] == [(0, 0), (1, 1), (2, 0)]


def test_an_image_that_no_pod_can_pull_is_said_before_there_is_any_member() -> None:
    """The store's pod has no replica index, so no attempt of one either."""
    stuck = store(phase="Pending", ip="", waiting="ErrImagePull", waiting_message="no such image")
    made = plan(begun(stuck), T0 + 60)
    assert reason(made) == "Stalled ImageUnavailable"
