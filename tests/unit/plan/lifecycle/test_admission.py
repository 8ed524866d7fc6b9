"""Jobs that each hold a part of the room that they need: which one releases it, and that each has a turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import jobs
from builders.jobs import T0
from concertina.api.internal import Internal, RequeueState
from concertina.api.status import JobStatus, rfc3339
from concertina.api.world import World
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.lifecycle import admission, line
from concertina.plan.observed import BlockedBy, JobObservation, JobView, PodView, QueuePlace
from concertina.plan.plan import plan

FIXED = jobs.spec(elastic=None)
ALONE, MINE = QueuePlace(), QueuePlace(turn=True)
BEHIND, BEHIND_A_FOREIGN_ONE = QueuePlace(ahead=("default", "older")), QueuePlace(ahead=("team", "theirs"))
TURN = JobStatus(internal=Internal(requeue_state=RequeueState(turn=rfc3339(T0))))
"""Place of a job whose turn began at T0."""


def short(held: int = 2, status: JobStatus | None = None, spec: Any = FIXED, **fields: Any) -> JobObservation:
    """Return a job of three replicas, of which `held` found room at T0."""
    pending = {"phase": "Pending", "waiting": "Unschedulable", "node": "", "ip": ""}
    pods = tuple(jobs.pod(index, **({} if index < held else pending)) for index in range(3))
    return jobs.observed(jobs.job(spec, status), pods, **fields)


def deleted(made: Plan) -> int:
    return sum(isinstance(action, DeletePod) for action in made.actions)


def ready(made: Plan) -> tuple[str, str]:
    """Return the condition's reason and its message."""
    condition = made.status.condition("Ready")
    assert condition is not None
    return condition.reason, condition.message


@pytest.mark.parametrize(
    ("place", "held", "after", "releases"),
    [
        (ALONE, 2, 10_000.0, False),
        (BEHIND, 2, 19.0, False),
        (BEHIND, 2, 20.0, True),
        (BEHIND, 0, 20.0, False),
        (None, 2, 10_000.0, False),
        (MINE, 2, 119.0, False),
        (MINE, 2, 120.0, True),
    ],
    ids=[
        "no other job waits",
        "not at once",
        "another one has its turn",
        "it holds nothing",
        "whose turn it is has not been worked out",
        "its turn",
        "its turn, for too long",
    ],
)
def test_which_job_releases_its_room(place: QueuePlace | None, held: int, after: float, releases: bool) -> None:
    made = plan(short(held, TURN, place=place), T0 + after)
    assert (made.status.internal.requeue_state.since is not None) == releases
    assert deleted(made) == (3 if releases else 0)
    if not releases and held and place not in (ALONE, None):
        assert made.recheck_after is not None


def test_the_status_says_why_it_releases_and_when_it_tries_again() -> None:
    made = plan(short(place=BEHIND), T0 + 20)
    reason, message = ready(made)
    assert reason == "Waiting"
    assert "only 2 of the 3 required replicas have resources" in message
    assert "releases them for default/older, whose turn it is; tries again when its own turn comes" in message
    assert [event.reason for event in made.events] == ["Requeued"]
    made = plan(short(status=TURN, place=MINE), T0 + 120)
    assert "releases them, and lets other waiting jobs have their turn first" in ready(made)[1]


def test_jobs_of_other_namespaces_are_not_named() -> None:
    made = plan(short(place=BEHIND_A_FOREIGN_ONE), T0 + 20)
    assert "releases them for a job of another namespace, whose turn it is" in ready(made)[1]
    said = made.status.model_dump_json() + " ".join(event.message for event in made.events)
    assert "theirs" not in said
    assert "team" not in said


def test_its_turn_begins_when_it_comes_and_ends_where_another_one_has_it() -> None:
    made = plan(short(place=MINE), T0 + 500)
    assert made.status.internal.requeue_state == RequeueState(turn=rfc3339(T0 + 500))
    assert made.recheck_after is not None
    assert plan(short(status=made.status, place=MINE), T0 + 619).status.internal.requeue_state.since is None
    assert plan(short(status=made.status, place=MINE), T0 + 620).status.internal.requeue_state.since is not None
    assert plan(short(0, made.status, place=BEHIND), T0 + 620).status.internal.requeue_state == RequeueState()
    assert plan(short(0, made.status, place=ALONE), T0 + 620).status.internal.requeue_state == RequeueState()
    assert (
        plan(short(0, made.status, place=None), T0 + 620).status.internal.requeue_state
        == made.status.internal.requeue_state
    )


def test_a_job_that_holds_nothing_in_its_turn_goes_on_asking() -> None:
    """The other jobs don't wait for it any more, but the job may use room that it finds by chance."""
    made = plan(short(0, TURN, place=replace(MINE, fits=True)), T0 + 120)
    requeue_state = made.status.internal.requeue_state
    assert deleted(made) == 0
    assert (requeue_state.since, requeue_state.turn, requeue_state.passed, requeue_state.passed_fitting) == (
        None,
        None,
        rfc3339(T0 + 120),
        True,
    )
    again = plan(short(0, made.status, place=BEHIND), T0 + 500)
    assert deleted(again) == 0
    assert again.status.internal.requeue_state == requeue_state
    again = plan(short(0, made.status, place=MINE), T0 + 600)
    assert again.status.internal.requeue_state.turn == rfc3339(T0 + 600), "it has another turn"


@pytest.mark.parametrize(
    ("place", "status", "after", "releases"),
    [
        (QueuePlace(hindrance=BlockedBy.TOO_LARGE), None, 19.0, False),
        (QueuePlace(hindrance=BlockedBy.TOO_LARGE), None, 20.0, True),
        (QueuePlace(turn=True), TURN, 20.0, False),
        (QueuePlace(turn=True, hindrance=BlockedBy.QUOTA), TURN, 20.0, True),
        (QueuePlace(ahead=("team", "theirs"), hindrance=BlockedBy.QUOTA), None, 20.0, True),
    ],
)
def test_room_that_does_not_help_the_job_is_soon_released(
    place: QueuePlace, status: JobStatus | None, after: float, releases: bool
) -> None:
    made = plan(short(2, status, place=place), T0 + after)
    requeue_state = made.status.internal.requeue_state
    assert deleted(made) == (3 if releases else 0)
    assert requeue_state.passed == (rfc3339(T0 + after) if releases else None)
    assert requeue_state.passed_fitting == releases, "it is not the first to try again"
    if releases and place.hindrance:
        assert f"more room would not help: {place.hindrance.value}" in ready(made)[1]


def test_a_job_that_room_does_not_help_and_holds_nothing_releases_nothing() -> None:
    made = plan(short(0, place=QueuePlace(hindrance=BlockedBy.EXCLUDED)), T0 + 500)
    assert made.status.internal.requeue_state == RequeueState()
    assert deleted(made) == 0


def test_a_torchrun_job_has_its_turn_too() -> None:
    status = TURN.model_copy(update={"world": World(round=1)})
    seen = short(2, status, jobs.command_spec(launcher="Torchrun", elastic=None), place=MINE)
    seen = replace(seen, pods=tuple(replace(pod, round=1) for pod in seen.pods))
    assert plan(seen, T0 + 119).status.internal.requeue_state.since is None
    made = plan(seen, T0 + 120)
    assert made.status.internal.requeue_state.passed == rfc3339(T0 + 120)
    assert deleted(made) == 3


@pytest.mark.parametrize(
    ("place", "tries"), [(BEHIND, False), (None, False), (MINE, True), (ALONE, True), (QueuePlace(turn=False), True)]
)
def test_when_it_tries_again(place: QueuePlace | None, tries: bool) -> None:
    away = RequeueState(count=1, since=rfc3339(T0), passed=rfc3339(T0), message="because")
    job = jobs.job(FIXED, JobStatus(internal=Internal(requeue_state=away)))
    made = plan(jobs.observed(job, place=place), T0 + 1000)
    requeue_state = made.status.internal.requeue_state
    assert any(isinstance(action, CreatePod) for action in made.actions) == tries
    assert (requeue_state.since is None) == tries
    assert (requeue_state.count, requeue_state.passed) == (1, away.passed), "forgotten before it has started"
    assert requeue_state.turn == (rfc3339(T0 + 1000) if place == MINE else None)
    if not tries:
        assert ready(made) == ("Waiting", "because")


def test_a_job_that_trains_above_its_least_size_is_not_robbed() -> None:
    seen = jobs.running(jobs.spec(), count=2)
    pending = jobs.pod(2, phase="Pending", waiting="Unschedulable", node="", ip="")
    seen = replace(seen, pods=(*seen.pods, pending), place=BEHIND)
    made = plan(seen, T0 + 1000)
    assert deleted(made) == 0
    assert ready(made)[0] == "Training"


@pytest.mark.parametrize(
    ("checkpoint", "releases"), [(None, False), ({"uri": "s3://bucket/run"}, True)], ids=["memory", "storage"]
)
def test_state_that_only_its_replicas_hold_is_not_released(checkpoint: Any, releases: bool) -> None:
    seen = jobs.running(FIXED)
    spec = jobs.spec(elastic=None, checkpoint=checkpoint)
    pending = jobs.pod(2, 1, phase="Pending", waiting="Unschedulable", node="", ip="")
    seen = replace(seen, job=replace(seen.job, spec=spec), pods=(*seen.pods[:2], pending), place=BEHIND)
    made = plan(seen, T0 + 1000)
    assert (made.status.internal.requeue_state.since is not None) == releases
    if releases:
        assert made.status.world.members == ()
        assert made.status.world.claim.round == 2, "the old round could go on"
        return
    # The job's turn ends nevertheless.
    first = seen.job.status.model_copy(
        update={"internal": Internal(requeue_state=RequeueState(turn=rfc3339(T0 + 900)))}
    )
    seen = replace(seen, job=replace(seen.job, status=first), place=MINE)
    assert plan(seen, T0 + 1019).status.internal.requeue_state.passed is None
    made = plan(seen, T0 + 1020)
    assert made.status.internal.requeue_state.passed == rfc3339(T0 + 1020)
    assert deleted(made) == 0


# --- a toy cluster


@dataclass
class Toy:
    """One job of the toy cluster. A pod needs one place."""

    view: JobView
    priority: int
    nowhere: bool = False
    """Whether no room fits the job, without any evidence of that."""
    pods: dict[int, PodView] = field(default_factory=dict)
    done_at: float | None = None
    released: list[float] = field(default_factory=list)

    @property
    def held(self) -> int:
        return sum(bool(pod.node) for pod in self.pods.values())


@dataclass
class ToyCluster:
    all: list[Toy]
    line: line.Line = line.EMPTY

    def work_out(self) -> None:
        jobs = {job.view.uid: found for job in self.all if (found := waits(job)) is not None}
        if jobs != self.line.jobs:
            self.line = line.worked_out(jobs, self.line)


RUNS = 60.0
HOURS = 12 * 3600.0


def toy(
    number: int, need: int, priority: int, created: float, nowhere: bool = False, namespace: str = "default"
) -> Toy:
    spec = jobs.spec(replicas=need, elastic=None)
    view = replace(jobs.job(spec), name=f"job-{number}", uid=f"uid-{number}", created=created, namespace=namespace)
    return Toy(view, priority, nowhere)


def waits(job: Toy) -> line.Waiting | None:
    found = line.waiting(job.view, job.pods.values(), False)
    return found and replace(found, requests={"cpu": Decimal(1)})


def step(cluster: ToyCluster, job: Toy, now: float) -> float:
    """Make one pass of a job as plan() would; return the seconds until its next pass."""
    seen = jobs.observed(job.view, tuple(job.pods.values()), place=cluster.line.places.get(job.view.uid, ALONE))
    ctx = JobContext(seen, job.view.spec, now)
    decision = admission.release(ctx)
    status = admission.next_status(ctx, decision or Decision(Phase.WAITING, "", ""))
    if decision and decision.requeue_state and decision.requeue_state != job.view.status.internal.requeue_state:
        assert len(cluster.line.jobs) > 1, "released while no other job waits"
        job.released.append(now)
    job.view = replace(job.view, status=job.view.status.model_copy(update={"internal": Internal(requeue_state=status)}))
    if decision:
        job.pods.clear()
        return HOURS
    for index in range(job.view.spec.replicas):
        pending = {"phase": "Pending", "node": "", "created": now, "priority": job.priority}
        job.pods.setdefault(index, jobs.pod(index, **pending))
    return admission.seconds_left(ctx) or HOURS


def schedule(all: list[Toy], capacity: int, chance: random.Random | None) -> None:
    """Give free places to waiting pods, in order of age or by chance."""
    free = capacity - sum(job.held for job in all if job.view.status.completion_time is None)
    pending = [(job, index) for job in all for index, pod in job.pods.items() if not pod.node]
    if chance:
        chance.shuffle(pending)
    else:
        pending.sort(key=lambda one: one[0].pods[one[1]].created)
    for job, index in pending:
        fits = free > 0 and not job.nowhere
        pod = job.pods[index]
        if fits or not pod.unschedulable:
            job.pods[index] = replace(pod, **({"node": "n", "waiting": ""} if fits else {"waiting": "Unschedulable"}))
        free -= fits


def run(all: list[Toy], capacity: int, chance: random.Random | None, last: Toy | None = None) -> float:
    """Run until every job that fits has ended, or `last` has its room; return the time."""
    now, feasible = T0, [job for job in all if job.view.spec.replicas <= capacity and not job.nowhere]
    cluster = ToyCluster(all)
    while any(job.view.status.completion_time is None for job in feasible):
        assert now < T0 + HOURS, [(job.view.name, job.view.status.internal.requeue_state, job.held) for job in all]
        before = [(job.view, dict(job.pods)) for job in all]
        cluster.work_out()
        wait = min(_live(cluster, job, now) for job in all)
        schedule(all, capacity, chance)
        if last and last.held >= last.view.spec.replicas:
            return now
        # If anything has changed, every job looks again before time advances.
        now += wait if before == [(job.view, job.pods) for job in all] else 0.1
    return now


def _live(cluster: ToyCluster, job: Toy, now: float) -> float:
    """Return the seconds until this job does something, if nothing changes."""
    if job.view.status.completion_time is not None:
        return HOURS
    if job.held < job.view.spec.replicas:
        return step(cluster, job, now)
    job.done_at = job.done_at or now + RUNS
    if now >= job.done_at:
        ended = job.view.status.model_copy(update={"completion_time": rfc3339(now)})
        job.view = replace(job.view, status=ended)
        job.pods.clear()
    return max(0.1, job.done_at - now)


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(1, 6),
    needs=st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 1), st.integers(0, 50), st.booleans(), st.sampled_from("ab")),
        min_size=1,
        max_size=5,
    ),
    chance=st.randoms(use_true_random=False),
)
def test_every_job_that_fits_runs_whatever_else_waits(capacity: int, needs: Any, chance: random.Random) -> None:
    run(
        [toy(number, need, priority, T0 + age, *rest) for number, (need, priority, age, *rest) in enumerate(needs)],
        capacity,
        chance,
    )


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(2, 4), min_size=2, max_size=2), chance=st.randoms(use_true_random=False))
def test_of_two_that_fit_the_first_in_line_never_releases(sizes: list[int], chance: random.Random) -> None:
    """With more than two jobs, the first one may release: its turn can pass while others train one after the other."""
    all = [toy(number, size, 0, T0 + number) for number, size in enumerate(sizes)]
    run(all, max(sizes), chance)
    assert all[0].released == []


def test_two_jobs_of_three_on_four_places_take_half_a_minute() -> None:
    all = [toy(0, 3, 0, T0), toy(1, 3, 0, T0)]
    for job in all:
        step(ToyCluster(all), job, T0)
        for index in range(2):
            job.pods[index] = replace(job.pods[index], node="somewhere")
    assert run(all, 4, random.Random(1)) < T0 + admission.PATIENCE + 2 * RUNS + 10


@pytest.mark.parametrize("in_order_of_age", [True, False])
@pytest.mark.parametrize("ahead", [3, 40])
@pytest.mark.parametrize("namespace", ["good", "evil"])
def test_a_job_that_just_fits_has_its_turn_whatever_is_ahead_of_it(
    ahead: int, in_order_of_age: bool, namespace: str
) -> None:
    """Four places are free. The jobs ahead need eight, and would fit if the cluster were empty."""
    all = [toy(number, 8, 0, T0 - 100 + number, namespace="evil") for number in range(ahead)]
    small = toy(99, 4, 0, T0, namespace=namespace)
    seconds = run([*all, small], 4, None if in_order_of_age else random.Random(1), small) - T0
    assert seconds < 2 * admission.TURN_TIMEOUT
