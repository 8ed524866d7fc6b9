"""The order of turns among the jobs that wait for room. Pure; `places` answers for all of them at once.

Each job has one turn before any job has a second one, and the first turns come in order of priority. Among equals a
turn under way goes on. Next are the jobs for which the room is enough that the waiting jobs hold together, then those
that have trained, then those of the namespace whose last turn is longest ago, then the older ones. Jobs that have had a
turn in vain follow in the order in which their turns ended, unless that room has become enough for them since.

Room does not help every job (`admission.hindrance`). A job that it does not help has no turn. A job whose quota is used
up has one among the jobs of its namespace, which could free the quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

from concertina.api.status import unix_seconds
from concertina.plan.facts import sizes
from concertina.plan.observed import BlockedBy, JobView, PodPhase, PodView, QueuePlace

NONE = Decimal(0)
NO_ROOM: Mapping[str, Decimal] = {}
Rank = tuple[bool, float, int, bool, bool, bool, float, float, str]


@dataclass(frozen=True)
class Waiting:
    """A job that waits for room."""

    namespace: str
    name: str
    priority: int
    """Of its pods."""
    trained: bool
    """It has trained before, and waits for a replacement."""
    created: float
    least: int
    """Pods that it needs."""
    held: int
    """Pods that have a node."""
    away: bool
    """It holds no pods until its turn comes."""
    turn: bool
    """Its status says that it is its turn."""
    passed: float
    """When its last turn ended in vain; 0 where it has had none."""
    passed_fitting: bool
    """The room held by the waiting jobs seemed enough then."""
    newest_pod: float = field(compare=False)
    """When that was made: nothing has changed since."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Of one pod; empty where that is not known."""
    hindrance: BlockedBy | None = None


def waiting(job: JobView, pods: Iterable[PodView], refused: bool) -> Waiting | None:
    """Return how a job waits for room; None where it does not. `refused`: whether the API server takes no more pods of
    it (a quota)."""
    spec, requeue_state = job.spec, job.status.internal.requeue_state
    if spec is None or job.deleting or spec.suspend or job.status.completion_time:
        return None
    alive = [pod for pod in pods if not pod.deleting and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)]
    held = sum(bool(pod.node) and pod.index is not None for pod in alive)
    # A job that has released once stands in line until it starts, even while its new pods wait for their first try.
    stuck = refused or requeue_state.count > 0 or any(pod.unschedulable for pod in alive)
    if not stuck or held >= sizes.least(spec):
        return None
    return Waiting(
        namespace=job.namespace,
        name=job.name,
        priority=max((pod.priority for pod in alive), default=requeue_state.priority),
        trained=bool(job.status.world.members),
        created=job.created,
        least=sizes.least(spec),
        held=held,
        away=requeue_state.since is not None,
        turn=requeue_state.turn is not None,
        passed=unix_seconds(requeue_state.passed) if requeue_state.passed else 0.0,
        passed_fitting=requeue_state.passed_fitting,
        newest_pod=max((pod.created for pod in alive), default=job.created),
        requests=next((pod.requests for pod in alive if pod.requests), {}),
    )


@dataclass(frozen=True)
class Line:
    """The jobs that wait for room, by uid, and where each of them stands."""

    jobs: Mapping[str, Waiting]
    room: Mapping[str, Decimal]
    """What they hold together: it is free once they release it."""
    places: Mapping[str, QueuePlace]
    """By uid. A job that is not in it waits alone, or not at all."""


EMPTY = Line({}, NO_ROOM, {})


def worked_out(jobs: Mapping[str, Waiting], before: Line) -> Line:
    """One walk over all of them. Room that was held before counts too: it is just being released."""
    room_now = _room_held(jobs.values())
    room = {name: max(room_now.get(name, NONE), before.room.get(name, NONE)) for name in room_now.keys() | before.room}
    fitting = {uid for uid, job in jobs.items() if _fits(job, room)}
    order = _order(jobs, fitting, before)
    free = [uid for uid, job in jobs.items() if job.hindrance is None]
    first = min(free, key=order.__getitem__, default=None)
    free_in = Counter(jobs[uid].namespace for uid in free)
    by_quota: dict[str, list[str]] = {}
    for uid, job in jobs.items():
        if job.hindrance is BlockedBy.QUOTA:
            by_quota.setdefault(job.namespace, []).append(uid)
    heads = {
        namespace: min((*uids, first) if first else uids, key=order.__getitem__) for namespace, uids in by_quota.items()
    }
    disputed = any(job.held or job.away for job in jobs.values())
    places = {}
    for uid, job in jobs.items():
        head, near = heads.get(job.namespace, first), len(by_quota.get(job.namespace, ()))
        if head is None:
            continue  # room helps none of them
        if job.hindrance not in (None, BlockedBy.QUOTA):
            place = QueuePlace(hindrance=job.hindrance)
        elif head != uid:
            place = QueuePlace(ahead=(jobs[head].namespace, jobs[head].name))
        else:
            helpers = near + (len(free) if job.hindrance is None else free_in[job.namespace]) - 1
            turn = disputed and helpers > 0
            place = QueuePlace(turn=turn, fits=turn and uid in fitting)
        if job.hindrance is BlockedBy.QUOTA and len(free) > free_in[job.namespace]:
            place = replace(place, hindrance=job.hindrance)
        places[uid] = place
    return Line(dict(jobs), room_now, places)


def _room_held(jobs: Iterable[Waiting]) -> dict[str, Decimal]:
    room: dict[str, Decimal] = {}
    for job in jobs:
        if job.held:
            for resource, amount in job.requests.items():
                room[resource] = room.get(resource, NONE) + amount * job.held
    return room


def _fits(job: Waiting, room: Mapping[str, Decimal]) -> bool:
    """A guess: the room may lie on nodes that are not for this job. Pods themselves are hardly ever what is scarce."""
    return all(
        amount * job.least <= room.get(resource, NONE)
        for resource, amount in job.requests.items()
        if resource != "pods"
    )


def _order(jobs: Mapping[str, Waiting], fitting: Collection[str], before: Line) -> dict[str, Rank]:
    """Return the rank of each job, by uid: the lowest goes first."""
    last_turns: dict[str, float] = {}
    for job in jobs.values():
        last_turns[job.namespace] = max(job.passed, last_turns.get(job.namespace, 0.0))
    order: dict[str, Rank] = {}
    for uid, job in jobs.items():
        place = before.places.get(uid)
        # The status of a job whose turn has just come does not say so yet.
        has_begun = place is not None and place.turn and before.jobs[uid].passed == job.passed
        turn = job.turn or has_begun
        fits = uid in fitting
        has_passed = bool(job.passed) and not turn and (job.passed_fitting or not fits)
        order[uid] = (
            has_passed,
            job.passed if has_passed else 0.0,
            -job.priority,
            not turn,
            not fits,
            not job.trained,
            last_turns[job.namespace],
            job.created,
            uid,
        )
    return order
