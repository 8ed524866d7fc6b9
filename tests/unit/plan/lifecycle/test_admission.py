"""Jobs that each hold a part of the room they need: who releases, who keeps, and that everyone has a turn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import jobs
from builders.jobs import T0
from concertina.api.internal import Gang, Internal
from concertina.api.status import JobStatus, rfc3339
from concertina.api.world import World
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.lifecycle import admission
from concertina.plan.observed import Competitor, Hindrance, JobView, Observed, PodView
from concertina.plan.plan import plan

FIXED = jobs.spec(elastic=None)
OLDER = Competitor("default", "older", "uid-0", 0, trained=False, created=T0 - 1, deferred=False)
YOUNGER = Competitor("default", "younger", "uid-2", 0, trained=False, created=T0 + 1, deferred=False)
FOREIGN = replace(YOUNGER, namespace="team")
TURNS = JobStatus(internal=Internal(gang=Gang(turn=rfc3339(T0))))
"""Of a job that is first in line since T0."""


def short(held: int = 2, status: JobStatus | None = None, spec: Any = FIXED, **fields: Any) -> Observed:
    """A job of three replicas, of which so many found room at T0."""
    pending = {"phase": "Pending", "waiting": "Unschedulable", "node": "", "ip": ""}
    pods = tuple(jobs.pod(index, **({} if index < held else pending)) for index in range(3))
    return jobs.observed(jobs.job(spec, status), pods, **fields)


def deleted(made: Plan) -> int:
    return sum(isinstance(action, DeletePod) for action in made.actions)


def ready(made: Plan) -> tuple[str, str]:
    """The condition's reason, and its message."""
    condition = made.status.condition("Ready")
    assert condition is not None
    return condition.reason, condition.message


@pytest.mark.parametrize(
    ("competitors", "held", "after", "releases"),
    [
        ((), 2, 10_000.0, False),
        ((OLDER,), 2, 19.0, False),
        ((OLDER,), 2, 20.0, True),
        ((OLDER,), 0, 20.0, False),
        ((YOUNGER,), 2, 119.0, False),
        ((YOUNGER,), 2, 120.0, True),
        ((replace(YOUNGER, deferred=True),), 2, 120.0, False),
        ((replace(OLDER, deferred=True),), 2, 20.0, False),
        ((replace(YOUNGER, priority=5),), 2, 20.0, True),
        ((replace(OLDER, priority=-5),), 2, 20.0, False),
        ((replace(YOUNGER, trained=True),), 2, 20.0, True),
    ],
    ids=[
        "nobody else waits",
        "not at once",
        "an older one waits",
        "it holds nothing",
        "first in line",
        "first in line, for too long",
        "who else waits lets others go first",
        "who is ahead lets others go first",
        "of higher priority",
        "of lower priority",
        "one that has trained already",
    ],
)
def test_who_releases_its_room(competitors: tuple[Competitor, ...], held: int, after: float, releases: bool) -> None:
    made = plan(short(held, TURNS, competitors=competitors), T0 + after)
    assert (made.status.internal.gang.since is not None) == releases
    assert deleted(made) == (3 if releases else 0)
    if not releases and competitors and held:
        assert made.recheck_after is not None


def test_why_it_releases_and_when_it_tries_again_is_said() -> None:
    made = plan(short(competitors=(OLDER,)), T0 + 20)
    reason, message = ready(made)
    assert reason == "Waiting"
    assert "only 2 of the 3 replicas needed found room" in message
    assert "releases them for default/older, which goes first (it is the older one)" in message
    assert [event.reason for event in made.events] == ["GivesWay"]
    made = plan(short(status=TURNS, competitors=(YOUNGER,)), T0 + 120)
    assert f"go first until {rfc3339(T0 + 240)}" in ready(made)[1]


@pytest.mark.parametrize(
    ("competitor", "reason"),
    [
        (replace(FOREIGN, created=T0 - 1), "it is the older one"),
        (replace(FOREIGN, priority=7), "it has a higher priority"),
        (replace(FOREIGN, trained=True), "it has trained already"),
    ],
)
def test_jobs_of_other_namespaces_are_not_named(competitor: Competitor, reason: str) -> None:
    made = plan(short(competitors=(competitor,)), T0 + 20)
    assert f"releases them for a job of another namespace, which goes first ({reason})" in ready(made)[1]
    told = made.status.model_dump_json() + " ".join(event.message for event in made.events)
    assert competitor.name not in told
    assert competitor.namespace not in told


def test_its_turn_begins_when_it_is_first_and_ends_where_another_one_is() -> None:
    made = plan(short(competitors=(YOUNGER,)), T0 + 500)
    assert made.status.internal.gang == Gang(turn=rfc3339(T0 + 500))
    assert made.recheck_after is not None
    assert plan(short(status=made.status, competitors=(YOUNGER,)), T0 + 619).status.internal.gang.since is None
    assert plan(short(status=made.status, competitors=(YOUNGER,)), T0 + 620).status.internal.gang.since is not None
    assert plan(short(0, made.status, competitors=(OLDER,)), T0 + 620).status.internal.gang == Gang()


def test_who_is_first_and_holds_nothing_has_its_turn_and_goes_on_asking() -> None:
    """The others don't wait for it any more, but room that is found by chance is its own."""
    made = plan(short(0, TURNS, competitors=(YOUNGER,)), T0 + 120)
    assert deleted(made) == 0
    assert (made.status.internal.gang.since, made.status.internal.gang.until) == (None, rfc3339(T0 + 240))
    seen = short(0, made.status, competitors=(YOUNGER,))
    mine = admission.waiting(seen.job, seen.pods, False)
    assert mine is not None
    assert mine.competitor.deferred
    assert plan(seen, T0 + 239).status.internal.gang == made.status.internal.gang
    again = plan(seen, T0 + 240).status
    assert again.internal.gang == Gang(releases=1), "it stands in line again"
    again = plan(short(0, again, competitors=(YOUNGER,)), T0 + 240).status
    again = plan(short(0, again, competitors=(YOUNGER,)), T0 + 360).status
    assert again.internal.gang.until == rfc3339(T0 + 600), "twice as long"


def test_who_lets_others_go_first_does_not_keep_what_it_finds_meanwhile() -> None:
    deferred = JobStatus(internal=Internal(gang=Gang(releases=1, until=rfc3339(T0 + 240))))
    made = plan(short(2, deferred, competitors=(YOUNGER,)), T0 + 40)
    assert deleted(made) == 3
    assert made.status.internal.gang.until == rfc3339(T0 + 240)


@pytest.mark.parametrize(
    ("hindrance", "competitors", "after", "until"),
    [
        (Hindrance.TOO_LARGE, (YOUNGER,), 19.0, None),
        (Hindrance.TOO_LARGE, (YOUNGER,), 20.0, 140.0),
        (Hindrance.EXCLUDED, (FOREIGN,), 20.0, 140.0),
        (Hindrance.BEYOND_QUOTA, (YOUNGER,), 20.0, 140.0),
        (Hindrance.QUOTA, (FOREIGN,), 20.0, 140.0),
        (Hindrance.QUOTA, (YOUNGER,), 119.0, None),
        (Hindrance.QUOTA, (YOUNGER,), 120.0, 240.0),
        (Hindrance.QUOTA, (YOUNGER, FOREIGN), 20.0, 140.0),
        (Hindrance.TOO_LARGE, (replace(YOUNGER, deferred=True),), 500.0, None),
        (Hindrance.TOO_LARGE, (), 500.0, None),
    ],
)
def test_what_more_room_would_not_complete_is_soon_released(
    hindrance: Hindrance, competitors: tuple[Competitor, ...], after: float, until: float | None
) -> None:
    made = plan(short(2, TURNS, competitors=competitors, hindrance=hindrance), T0 + after)
    assert made.status.internal.gang.until == (rfc3339(T0 + until) if until else None)
    assert deleted(made) == (3 if until else 0)
    if until:
        assert f"more room would not help: {hindrance.value}" in ready(made)[1]


@pytest.mark.parametrize("hindrance", list(Hindrance))
def test_nothing_is_released_by_who_holds_nothing_and_can_not_start(hindrance: Hindrance) -> None:
    made = plan(short(0, TURNS, competitors=(FOREIGN,), hindrance=hindrance), T0 + 500)
    assert made.status.internal.gang == Gang()
    assert deleted(made) == 0


def test_a_torchrun_job_has_its_turn_too() -> None:
    status = TURNS.model_copy(update={"world": World(round=1)})
    seen = short(2, status, jobs.command_spec(launcher="torchrun", elastic=None), competitors=(YOUNGER,))
    seen = replace(seen, pods=tuple(replace(pod, round=1) for pod in seen.pods))
    assert plan(seen, T0 + 119).status.internal.gang.since is None
    made = plan(seen, T0 + 120)
    assert made.status.internal.gang.until == rfc3339(T0 + 240)
    assert deleted(made) == 3


def away(until: float | None = None, releases: int = 1, **fields: Any) -> Observed:
    status = Gang(releases=releases, since=rfc3339(T0), until=rfc3339(until) if until else None, message="because")
    return jobs.observed(jobs.job(FIXED, JobStatus(internal=Internal(gang=status))), **fields)


@pytest.mark.parametrize(
    ("until", "competitors", "now", "tries"),
    [
        (None, (OLDER,), T0 + 1000, False),
        (None, (YOUNGER,), T0 + 1, True),
        (None, (replace(OLDER, deferred=True),), T0 + 1, True),
        (None, (), T0 + 1, True),
        (T0 + 60, (YOUNGER,), T0 + 59, False),
        (T0 + 60, (YOUNGER,), T0 + 60, True),
        (T0 + 60, (), T0 + 1, True),
        (T0 + 60, (replace(YOUNGER, deferred=True),), T0 + 1, True),
    ],
)
def test_when_it_tries_again(until: float | None, competitors: tuple[Competitor, ...], now: float, tries: bool) -> None:
    made = plan(away(until, competitors=competitors), now)
    assert any(isinstance(action, CreatePod) for action in made.actions) == tries
    assert (made.status.internal.gang.since is None) == tries
    assert made.status.internal.gang.releases == 1, "forgotten before it has started"
    if not tries:
        assert ready(made) == ("Waiting", "because")


def test_a_job_that_trains_above_its_least_size_is_not_robbed() -> None:
    seen = jobs.running(jobs.spec(), count=2)
    pending = jobs.pod(2, phase="Pending", waiting="Unschedulable", node="", ip="")
    seen = replace(seen, pods=(*seen.pods, pending), competitors=(replace(OLDER, priority=9),))
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
    seen = replace(seen, job=replace(seen.job, spec=spec), pods=(*seen.pods[:2], pending), competitors=(OLDER,))
    seen = replace(seen, competitors=(replace(OLDER, trained=True),))
    made = plan(seen, T0 + 1000)
    assert (made.status.internal.gang.since is not None) == releases
    if not releases:  # but it does not go first for ever
        first = seen.job.status.model_copy(update={"internal": Internal(gang=Gang(turn=rfc3339(T0 + 900)))})
        seen = replace(seen, job=replace(seen.job, status=first), competitors=(YOUNGER,))
        assert plan(seen, T0 + 1019).status.internal.gang.until is None
        made = plan(seen, T0 + 1020)
        assert made.status.internal.gang.until == rfc3339(T0 + 1140)
        assert deleted(made) == 0
    if releases:
        assert made.status.world.members == ()
        assert made.status.world.claim.round == 2, "the old round could go on"


# --- a toy cluster


@dataclass
class Toy:
    """One job of the toy cluster."""

    view: JobView
    priority: int
    nowhere: bool = False
    """No room is right for it, and nobody can tell."""
    pods: dict[int, PodView] = field(default_factory=dict)
    done_at: float | None = None
    released: list[float] = field(default_factory=list)

    @property
    def held(self) -> int:
        return sum(bool(pod.node) for pod in self.pods.values())


RUNS = 60.0
HOURS = 12 * 3600.0


def toy(number: int, need: int, priority: int, created: float, nowhere: bool = False) -> Toy:
    spec = jobs.spec(replicas=need, elastic=None)
    view = replace(jobs.job(spec), name=f"job-{number}", uid=f"uid-{number}", created=created)
    return Toy(view, priority, nowhere)


def waiting(job: Toy) -> admission.Waiting | None:
    return admission.waiting(job.view, job.pods.values(), False)


def step(all: list[Toy], job: Toy, now: float) -> float:
    """One pass of a job, as plan() would make it; seconds until it wants another."""
    competitors = tuple(found.competitor for other in all if other is not job and (found := waiting(other)))
    seen = jobs.observed(job.view, tuple(job.pods.values()), competitors=competitors if waiting(job) else ())
    ctx = JobContext(seen, job.view.spec, now)
    decision = admission.release(ctx)
    status = admission.next_status(ctx, decision or Decision(Phase.WAITING, "", ""))
    if decision and decision.gang and decision.gang != job.view.status.internal.gang:
        assert competitors, "released while nobody else waits"
        job.released.append(now)
    job.view = replace(job.view, status=job.view.status.model_copy(update={"internal": Internal(gang=status)}))
    if decision:
        job.pods.clear()
        return decision.recheck or HOURS
    for index in range(job.view.spec.replicas):
        pending = {"phase": "Pending", "node": "", "created": now, "priority": job.priority}
        job.pods.setdefault(index, jobs.pod(index, **pending))
    return admission.seconds_left(ctx) or HOURS


def schedule(all: list[Toy], capacity: int, random: Any) -> None:
    """Pods that wait get what is free, in any order."""
    free = capacity - sum(job.held for job in all if job.view.status.completion_time is None)
    pending = [(job, index) for job in all for index, pod in job.pods.items() if not pod.node]
    random.shuffle(pending)
    for job, index in pending:
        fits = free > 0 and not job.nowhere
        found = {"node": "somewhere", "waiting": ""} if fits else {"waiting": "Unschedulable"}
        job.pods[index] = replace(job.pods[index], **found)
        free -= fits


def run(all: list[Toy], capacity: int, random: Any) -> float:
    """Until every job that fits has ended; returns when."""
    now, feasible = T0, [job for job in all if job.view.spec.replicas <= capacity and not job.nowhere]
    while any(job.view.status.completion_time is None for job in feasible):
        assert now < T0 + HOURS, [(job.view.name, job.view.status.internal.gang, job.held) for job in all]
        before = [(job.view, dict(job.pods)) for job in all]
        wait = min(_live(all, job, now) for job in all)
        schedule(all, capacity, random)
        # Whatever has changed, every job looks again before time goes on.
        now += wait if before == [(job.view, job.pods) for job in all] else 0.1
    return now


def _live(all: list[Toy], job: Toy, now: float) -> float:
    """Seconds until this job does something, if nothing changes."""
    if job.view.status.completion_time is not None:
        return HOURS
    if job.held < job.view.spec.replicas:
        return step(all, job, now)
    job.done_at = job.done_at or now + RUNS
    if now >= job.done_at:
        ended = job.view.status.model_copy(update={"completion_time": rfc3339(now)})
        job.view = replace(job.view, status=ended)
        job.pods.clear()
    return max(0.1, job.done_at - now)


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 6),
    needs=st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 1), st.integers(0, 50), st.booleans()), min_size=1, max_size=5
    ),
    random=st.randoms(use_true_random=False),
)
def test_every_job_that_fits_runs_whatever_else_waits(capacity: int, needs: Any, random: Any) -> None:
    all = [toy(number, need, priority, T0 + age, no) for number, (need, priority, age, no) in enumerate(needs)]
    run(all, capacity, random)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(2, 4), min_size=2, max_size=2), random=st.randoms(use_true_random=False))
def test_of_two_that_fit_the_first_in_line_never_releases(sizes: list[int], random: Any) -> None:
    """Of more it may: while others train one after the other, its turn can pass."""
    all = [toy(number, size, 0, T0 + number) for number, size in enumerate(sizes)]
    run(all, max(sizes), random)
    assert all[0].released == []


def test_two_jobs_of_three_on_four_places_take_half_a_minute() -> None:
    import random

    all = [toy(0, 3, 0, T0), toy(1, 3, 0, T0)]
    for job in all:
        step(all, job, T0)
        for index in range(2):
            job.pods[index] = replace(job.pods[index], node="somewhere")
    assert run(all, 4, random.Random(1)) < T0 + admission.PATIENCE + 2 * RUNS + 10
