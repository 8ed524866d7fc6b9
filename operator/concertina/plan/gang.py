"""Who goes first where several jobs each hold a part of the room that they need to start: the others release theirs.

A job waits for room when it has fewer placed pods than its least size and the rest can't be placed. Waiting jobs stand
in line: by the priority of their pods, then those that have trained already, then the older one, then uid. Who holds
room in vain and isn't first releases it after PATIENCE, and stays away until nobody waits ahead of it. Who is first in
line keeps what it has; only if it can't start within TURN it lets the others go first for a set time, twice as long at
each time that follows: so every job that fits has its turn, however large the ones ahead of it are. Nobody releases
anything while nobody else waits. What was released, and how often, stands in status.gang."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from concertina.api.status import Gang, rfc3339, unix_seconds
from concertina.plan import claims, rounds, sizes
from concertina.plan.decision import Decision, Phase, Pods
from concertina.plan.look import Look
from concertina.plan.types import Event, JobView, PodView, Refusal, Refused, Rival

PATIENCE = 20.0
"""Seconds for which room is held in vain by who isn't first in line; doubled after each release, three times."""
TURN = 120.0
"""Seconds that the first in line has to start, while others wait."""
LONGEST = 3600.0
"""Seconds, at most, for which a job lets the others go first."""


@dataclass(frozen=True)
class Waiting:
    """A job that waits for room, as it sees itself."""

    rival: Rival
    """As the others see it."""
    held: int
    """Pods that have a node."""
    since: float
    """When its newest pod was made: nothing has changed since."""
    away: bool = False
    """It released what it had."""


def waiting(job: JobView, pods: Iterable[PodView], refused: bool) -> Waiting | None:
    """None where it does not wait for room; `refused`: whether the API server takes no more pods of it (a quota)."""
    spec, gang = job.spec, job.status.gang
    if spec is None or job.deleting or spec.suspend or job.status.completion_time:
        return None
    alive = [pod for pod in pods if not pod.deleting and pod.phase in ("Pending", "Running")]
    held = sum(bool(pod.node) for pod in alive)
    # Whoever has released once stands in line until it starts, even while its new pods wait for their first try.
    stuck = refused or gang.releases > 0 or any(pod.waiting == "Unschedulable" for pod in alive)
    if not stuck or held >= sizes.least(spec):
        return None
    rival = Rival(
        job=f"{job.namespace}/{job.name}",
        uid=job.uid,
        priority=max((pod.priority for pod in alive), default=gang.priority),
        trained=bool(job.status.world.members),
        created=job.created,
        aside=gang.until is not None,
    )
    return Waiting(rival, held, max((pod.created for pod in alive), default=job.created), gang.since is not None)


def by_quota(refused: Refused | None) -> bool:
    """Other refusals no other job can end by giving way."""
    return refused is not None and refused.kind is Refusal.QUOTA


def release(look: Look) -> Decision | None:
    """Holds no pods for a while, so that another job can start."""
    mine = _mine(look)
    if mine is None:
        return None
    gang, first = look.status.gang, _ahead(look, mine)
    if gang.since is not None:
        return _away(look, gang) if _stays_away(look, mine) else None
    if left(look) > 0 or not _may_release(look, mine):
        return None
    times = gang.releases + 1
    until = None if first else rfc3339(round(look.now + min(LONGEST, TURN * 2.0 ** min(gang.releases, 10)), 3))
    made = Gang(
        releases=times,
        since=rfc3339(round(look.now, 3)),
        until=until,
        priority=mine.rival.priority,
        message=_why(look, mine, first, until),
    )
    return replace(
        _away(look, made),
        world=claims.disbanded(look, "GivesWay"),
        events=(Event("Warning", "GivesWay", made.message),),
    )


def left(look: Look) -> float:
    """Seconds until the job may have to release its pods, or may try again; 0 where it holds none."""
    mine, gang = _mine(look), look.status.gang
    if mine is None:
        return 0.0
    if gang.since is not None:
        return max(0.0, unix_seconds(gang.until) - look.now) if gang.until else 0.0
    if not _may_release(look, mine):
        return 0.0
    patience = PATIENCE * 2.0 ** min(gang.releases, 3) if _ahead(look, mine) else TURN
    return max(0.0, mine.since + patience - look.now)


def after(look: Look, decision: Decision) -> Gang:
    """status.gang after this pass: a round that was committed ends the count."""
    if decision.gang:
        return decision.gang
    if decision.world and decision.world.round > look.world.round:
        return Gang()
    old = look.status.gang
    return Gang(releases=old.releases) if old.since else old


def _mine(look: Look) -> Waiting | None:
    observed = look.observed
    return waiting(observed.job, observed.pods, by_quota(observed.refused)) if observed.rivals else None


def _ahead(look: Look, mine: Waiting) -> Rival | None:
    """The first in line, unless that is this job itself."""
    line = [rival for rival in look.observed.rivals if not rival.aside and rival.place < mine.rival.place]
    return min(line, key=lambda rival: rival.place, default=None)


def _stays_away(look: Look, mine: Waiting) -> bool:
    until = look.status.gang.until
    return look.now < unix_seconds(until) if until else _ahead(look, mine) is not None


def _may_release(look: Look, mine: Waiting) -> bool:
    """It holds something, somebody could use it, and no state is lost that nothing else holds."""
    if not mine.held or all(rival.aside for rival in look.observed.rivals):
        return False
    if look.members and look.spec.bundled and look.spec.checkpoint is None:
        return False
    return not (look.committed and rounds.broken(look) is None)


def _why(look: Look, mine: Waiting, first: Rival | None, until: str | None) -> str:
    had = f"only {mine.held} of the {sizes.least(look.spec)} replicas needed found room"
    if first is None:
        return f"{had} within {TURN:.0f} s: releases them, and lets other jobs that wait go first until {until}"
    reason = (
        f"priority {first.priority} is higher than {mine.rival.priority}"
        if first.priority > mine.rival.priority
        else "it has trained already"
        if first.trained > mine.rival.trained
        else "it is the older one"
    )
    return f"{had}: releases them for {first.job}, which goes first ({reason}); tries again when that no longer waits"


def _away(look: Look, gang: Gang) -> Decision:
    recheck = unix_seconds(gang.until) - look.now if gang.until else None
    return Decision(Phase.WAITING, "GivesWay", gang.message, gang=gang, recheck=recheck, pods=Pods.NONE)
