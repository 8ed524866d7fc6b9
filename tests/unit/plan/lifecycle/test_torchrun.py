"""`launcher: Torchrun`: the store comes first, members join its round, and all is recreated when the round is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import jobs
from builders.jobs import T0
from concertina.api.internal import Internal, RequeueState
from concertina.controller.status_patches import claim_tests
from concertina.plan.actions import CreatePod, CreateRendezvous, DeletePod, Plan, Rendezvous
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.plan import plan

ELASTIC = {"minReplicas": 2}


def spec(**fields: Any) -> Any:
    return jobs.command_spec(launcher="Torchrun", **fields)


def store(**fields: Any) -> Any:
    return jobs.pod(None, 1, **{"name": "demo-rendezvous-1", "uid": "store", "round": 1, "ip": "127.0.0.9", **fields})


def members(*indexes: int, **fields: Any) -> tuple[Any, ...]:
    return tuple(jobs.pod(index, round=1, **fields) for index in indexes)


def begun(*pods: Any, **fields: Any) -> JobObservation:
    """Return a job in round 1 with these pods."""
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
    assert made.trace is None


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


@pytest.mark.parametrize(
    ("end", "counted"),
    [
        ({"exit_reason": "Evicted"}, 0),
        ({"exit_code": 137, "exit_reason": "OOMKilled"}, 1),
        ({"exit_code": 143, "exit_reason": "Error"}, 0),
        ({"phase": "Running", "deleting": True}, 0),
    ],
    ids=lambda end: str(end),
)
@pytest.mark.parametrize("elastic", [None, ELASTIC], ids=["fixed", "elastic"])
def test_who_is_lost_while_the_others_have_ended_well_means_another_rendezvous(
    elastic: Any, end: dict[str, Any], counted: int
) -> None:
    ended = members(0, 1, phase="Succeeded", exit_code=0)
    made = plan(begun(store(), *ended, *members(2, **{"phase": "Failed", **end}), elastic=elastic), T0 + 5)
    assert made.status.world.round == 2
    assert made.status.restarts.in_window == counted
    (event,) = made.events
    assert (event.reason, "demo-2-0" in event.message) == ("MemberLost", True)


def test_who_has_found_no_place_keeps_no_job_from_its_end() -> None:
    """Such a pod would find the rendezvous closed."""
    ended, waits = members(0, 1, phase="Succeeded", exit_code=0), {"phase": "Pending", "ip": "", "node": ""}
    made = plan(begun(store(), *ended, *members(2, **waits, waiting="Unschedulable"), elastic=ELASTIC), T0 + 5)
    complete = made.status.condition("Complete")
    assert complete
    assert (complete.status, complete.message) == ("True", "torchrun has ended with exit code 0 in 2 replicas")
    made = plan(begun(store(), *members(0, 1, 2, **waits), elastic=ELASTIC), T0 + 5)
    assert reason(made) == "Waiting WaitingForReplicas"
    made = plan(begun(store(), *ended, *members(2, **waits, waiting="Unschedulable"), elastic=None), T0 + 5)
    assert reason(made) == "Training Ending", "the one before it was in their world"


def test_suspending_deletes_all_and_resuming_makes_a_store_again() -> None:
    seen = begun(store(), *members(0, 1, 2))
    suspended = replace(seen, job=replace(seen.job, spec=spec(suspend=True)))
    made = plan(suspended, T0 + 5)
    assert len(of(made, DeletePod)) == 4
    gone = jobs.then(suspended, plan(jobs.then(suspended, made, pods=()), T0 + 6), pods=())
    resumed = replace(gone, job=replace(gone.job, spec=spec()))
    made = plan(resumed, T0 + 7)
    assert made.status.rounds == 2
    assert made.status.restarts.total == 0
    round = made.status.world.round
    assert of(plan(jobs.then(resumed, made), T0 + 8), CreateRendezvous) == [CreateRendezvous(round)]


def claim_of(made: Plan) -> Any:
    claim = made.status.world.claim
    assert claim is not None
    assert claim.committed
    return claim


def test_each_beginning_and_each_end_of_a_round_is_a_claim_of_its_own() -> None:
    """Every status write tests the claim, so an operator that does not know it can write nothing."""
    first = jobs.observed(jobs.job(spec()), fresh_claim="one")
    made = plan(first, T0)
    assert (claim_of(made).round, claim_of(made).claim_id) == (1, "one")
    here = jobs.then(first, made, pods=(store(), *members(0, 1, 2)), fresh_claim="two")
    assert claim_of(plan(here, T0 + 5)).claim_id == "one", "none where nothing begins or ends"

    lost = plan(replace(here, pods=members(0, 1, 2)), T0 + 5)
    assert (claim_of(lost).round, claim_of(lost).claim_id) == (2, "two")
    assert lost.status.world.round == 2
    deposed = claim_tests(here.job.status.manifest())
    assert deposed != claim_tests(lost.status.manifest()), "its writes are refused"

    suspended = replace(here, job=replace(here.job, spec=spec(suspend=True)))
    ended = plan(suspended, T0 + 5)
    assert (claim_of(ended).round, claim_of(ended).claim_id) == (2, "two")
    assert ended.status.world.round == 1
    at_rest = jobs.then(suspended, ended, pods=(), fresh_claim="three")
    still = plan(at_rest, T0 + 6)
    assert claim_of(still).claim_id == "two", "one is enough"
    resumed = replace(at_rest, job=replace(at_rest.job, spec=spec()))
    again = plan(resumed, T0 + 7)
    assert (again.status.world.round, claim_of(again).round, claim_of(again).claim_id) == (3, 3, "three")


def test_a_round_that_an_older_operator_began_without_a_claim_goes_on() -> None:
    seen = begun(store(), *members(0, 1, 2))
    status = seen.job.status.model_copy(update={"world": seen.job.status.world.model_copy(update={"claim": None})})
    seen = replace(seen, job=replace(seen.job, status=status))
    made = plan(seen, T0 + 5)
    assert (made.actions, made.status.world.round, made.status.world.claim) == ((), 1, None)
    ended = plan(replace(seen, job=replace(seen.job, spec=spec(suspend=True))), T0 + 5)
    assert claim_of(ended).round == 2


def test_a_launcher_that_was_changed_while_suspended_begins_with_a_rendezvous() -> None:
    of_agents = jobs.running(jobs.command_spec())
    seen = replace(of_agents, job=replace(of_agents.job, spec=spec()))
    made = plan(seen, T0 + 20)
    assert made.status.world.round == 2
    assert not made.status.world.members
    after = plan(jobs.then(seen, made), T0 + 21)
    assert of(after, CreateRendezvous) == [CreateRendezvous(2)]
    assert len(of(after, DeletePod)) == 3


@pytest.mark.parametrize("old", ["store", "member"])
def test_pods_made_of_another_template_mean_another_rendezvous(old: str) -> None:
    pods = (
        store(template_hash="old" if old == "store" else "new"),
        *members(0, template_hash="old" if old == "member" else "new"),
        *members(1, template_hash="new"),
        *members(2),
    )
    seen = begun(*pods)
    assert not plan(seen, T0 + 5).actions, "an operator that does not know what its job says judges nothing"
    made = plan(replace(seen, job=replace(seen.job, template_hash="new")), T0 + 5)
    assert made.status.world.round == 2
    assert made.status.restarts.total == 0
    assert [event.reason for event in made.events] == ["TemplateChanged"]


def test_a_job_that_let_others_go_first_is_remembered_to_have_until_it_runs() -> None:
    """The job's next round begins before there is room for it."""
    seen = jobs.observed(jobs.job(spec()))
    requeue_state = RequeueState(count=2, priority=3)
    status = seen.job.status.model_copy(update={"internal": Internal(requeue_state=requeue_state)})
    seen = replace(seen, job=replace(seen.job, status=status))
    made = plan(seen, T0)
    assert made.status.internal.requeue_state.count == 2
    made = plan(jobs.then(seen, made, pods=(store(), *members(0, 1, 2))), T0 + 1)
    assert made.status.internal.requeue_state == RequeueState()


def test_names_that_other_pods_hold_are_passed_over() -> None:
    """If the watch does not show the pod, the store's name is known to be taken only after its first create."""
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
    """The store's pod has no replica index, and so no attempt of one."""
    stuck = store(phase="Pending", ip="", waiting="ErrImagePull", waiting_message="no such image")
    made = plan(begun(stuck), T0 + 60)
    assert reason(made) == "Stalled ImageUnavailable"
