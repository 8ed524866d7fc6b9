"""Order of turns among the jobs that wait for resources. `worked_out` computes all places at once and is pure.

Each job has one turn before any job has a second one. First turns are in this order:
1. jobs with a higher priority;
2. the job whose turn has already begun;
3. jobs that fit into the resources that all waiting jobs together already occupy;
4. jobs that have trained before;
5. jobs of the namespace whose last turn is longest ago;
6. older jobs.

Jobs whose turn ended without a start come after all first turns, in the order in which their turns ended. Such a job
counts as new again if the occupied resources were too small for it during its turn and are large enough now.

More resources do not help some jobs (`admission.hindrance`). These jobs have no turn. If a job waits because its
namespace's resource quota is used up, it takes turns only with jobs of that namespace, because only these can free the
quota.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

from concertina.api.status import unix_seconds
from concertina.plan.facts import gangs, sizes
from concertina.plan.observed import BlockedBy, JobView, PodPhase, PodView, QueuePlace

NONE = Decimal(0)
NO_ROOM: Mapping[str, Decimal] = {}
Rank = tuple[bool, float, int, bool, bool, bool, float, float, str]


@dataclass(frozen=True)
class Waiting:
    """Facts about a job that waits for resources on nodes or in a resource quota."""

    namespace: str
    name: str
    priority: int
    """Priority of the job's pods. Jobs with a higher priority have their turns first."""
    trained: bool
    """True if the job has trained before and now waits for a replacement replica."""
    created: float
    least: int
    """Number of pods that the job needs."""
    held: int
    """Number of the job's pods that have a node."""
    away: bool
    """True if the job has deleted its pods until its turn comes."""
    turn: bool
    """True if the job's status says that it has its turn now."""
    passed: float
    """Unix time at which the job's last turn ended without a start; 0 if there was no such turn."""
    passed_fitting: bool
    """True if the resources occupied by all waiting jobs seemed enough for the job when its last turn ended."""
    newest_pod: float = field(compare=False)
    """Creation time of the job's newest pod in Unix seconds. The job has created no pods since then."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Resource requests of one pod; empty if unknown."""
    hindrance: BlockedBy | None = None


def waiting(job: JobView, pods: Iterable[PodView], refused: bool) -> Waiting | None:
    """Return the data that determine a waiting job's place in the order of turns; None if the job does not wait.

    Args:
        job: The job.
        pods: Pods of the job.
        refused: Whether a resource quota refuses more pods of the job.
    """
    spec, requeue_state = job.spec, job.status.internal.requeue_state
    if spec is None or job.deleting or spec.suspend or job.status.completion_time:
        return None
    alive = [pod for pod in pods if not pod.deleting and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)]
    if gangs.scheduled_together(job.status, alive):
        return None
    held_count = sum(bool(pod.node) and pod.index is not None for pod in alive)
    # A job that has released its pods once waits in line until it starts, even before it tries to create new pods.
    stuck = refused or requeue_state.count > 0 or any(pod.unschedulable for pod in alive)
    if not stuck or held_count >= sizes.least(spec):
        return None
    return Waiting(
        namespace=job.namespace,
        name=job.name,
        priority=max((pod.priority for pod in alive), default=requeue_state.priority),
        trained=bool(job.status.world.members),
        created=job.created,
        least=sizes.least(spec),
        held=held_count,
        away=requeue_state.since is not None,
        turn=requeue_state.turn is not None,
        passed=unix_seconds(requeue_state.passed) if requeue_state.passed else 0.0,
        passed_fitting=requeue_state.passed_fitting,
        newest_pod=max((pod.created for pod in alive), default=job.created),
        requests=next((pod.requests for pod in alive if pod.requests), {}),
    )


@dataclass(frozen=True)
class Line:
    """Result of `worked_out`: the jobs that wait for resources, and their places in the order of turns, by uid."""

    jobs: Mapping[str, Waiting]
    room: Mapping[str, Decimal]
    """Amounts of each resource that the waiting jobs occupy together.

    They become free when the jobs release their pods.
    """
    places: Mapping[str, QueuePlace]
    """Places in the order of turns by uid. A job without a place waits alone or does not wait."""


EMPTY = Line({}, NO_ROOM, {})


def worked_out(jobs: Mapping[str, Waiting], last_line: Line) -> Line:
    """Compute the places of all waiting jobs in the order of turns.

    A job fits if the resources that all waiting jobs occupy are enough for it. Resources that were occupied in the
    previous computation (`last_line`) count too, because jobs may be releasing them now.
    """
    room_now = _room_held(jobs.values())
    room = {
        name: max(room_now.get(name, NONE), last_line.room.get(name, NONE)) for name in room_now.keys() | last_line.room
    }
    fitting = {uid for uid, job in jobs.items() if _fits(job, room)}
    order = _order(jobs, fitting, last_line)
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
        head, blocked_count = heads.get(job.namespace, first), len(by_quota.get(job.namespace, ()))
        if head is None:
            continue  # more resources help none of the jobs
        if job.hindrance not in (None, BlockedBy.QUOTA):
            queue_place = QueuePlace(hindrance=job.hindrance)
        elif head != uid:
            queue_place = QueuePlace(ahead=(jobs[head].namespace, jobs[head].name))
        else:
            helpers = blocked_count + (len(free) if job.hindrance is None else free_in[job.namespace]) - 1
            turn = disputed and helpers > 0
            queue_place = QueuePlace(turn=turn, fits=turn and uid in fitting)
        if job.hindrance is BlockedBy.QUOTA and len(free) > free_in[job.namespace]:
            queue_place = replace(queue_place, hindrance=job.hindrance)
        places[uid] = queue_place
    return Line(dict(jobs), room_now, places)


def _room_held(jobs: Iterable[Waiting]) -> dict[str, Decimal]:
    room: dict[str, Decimal] = {}
    for job in jobs:
        if job.held:
            for resource, amount in job.requests.items():
                room[resource] = room.get(resource, NONE) + amount * job.held
    return room


def _fits(job: Waiting, room: Mapping[str, Decimal]) -> bool:
    """Return whether the resources that all waiting jobs occupy together (`room`) seem enough for a job.

    This is an estimate: the resources may be on nodes that can't run this job. The `pods` resource is ignored, because
    nodes hardly ever run out of it.
    """
    return all(
        amount * job.least <= room.get(resource, NONE)
        for resource, amount in job.requests.items()
        if resource != "pods"
    )


def _order(jobs: Mapping[str, Waiting], fitting: Collection[str], last_line: Line) -> dict[str, Rank]:
    """Return the sort rank of each waiting job, keyed by uid. The job with the lowest rank has the first turn."""
    last_turns: dict[str, float] = {}
    for job in jobs.values():
        last_turns[job.namespace] = max(job.passed, last_turns.get(job.namespace, 0.0))
    order: dict[str, Rank] = {}
    for uid, job in jobs.items():
        last_place = last_line.places.get(uid)
        # A turn that has just begun is not in the job's status yet.
        has_begun = last_place is not None and last_place.turn and last_line.jobs[uid].passed == job.passed
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
