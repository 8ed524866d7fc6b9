"""One pass for one job: observe, plan, apply. Every trigger, whatever it is, ends up here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from concertina.agents.links import Links
from concertina.controller.apply import Applier, Outdated
from concertina.controller.journal import decision
from concertina.controller.master_keys import MasterKeys
from concertina.controller.world import Job, World
from concertina.controller.writes import Writes
from concertina.kube.errors import ApiError, Conflict, Forbidden, NotFound, Unauthorized, Unreachable
from concertina.kube.resources import TRAINING_JOBS
from concertina.plan.types import Action, Observed, Plan, Refusal

log = logging.getLogger(__name__)
NOT_NOW_SECONDS = 1.0
"""Until the next try while the Lease is in doubt or the API server is away."""
AGAIN_SECONDS = 0.02
"""Until a pass whose precondition was lost is made again; doubled each time that follows."""
LONGEST_SECONDS = 30.0
FORBIDDEN_SECONDS = 3.0
Planner = Callable[[Observed, float], Plan]


@dataclass
class Reconciler:
    world: World
    links: Links
    applier: Applier
    plan: Planner
    keys: MasterKeys
    may_act: Callable[[], bool]
    """False while another operator may be the one that acts."""
    changed_within: Callable[[str, float], None]
    """Has the job's next pass made within so many seconds."""
    passes: int = 0

    def __post_init__(self) -> None:
        self._writes = Writes(self.applier.write, self._not_written, lambda uid: self.changed_within(uid, 0.0))

    def close(self) -> None:
        self._writes.close()

    async def run(self, uid: str) -> float | None:
        """The work of the queue: seconds until the job is due again, or None."""
        job = self.world.job(uid)
        if job is None:
            self._drop(uid)
            return None
        if not self.may_act():
            return NOT_NOW_SECONDS
        self.passes += 1
        key = self.keys.of(job.view.status.master_key)
        if key is not None:
            self.links.open(uid, job.view.created, key)
        observed = self.world.observe(uid)
        assert observed is not None
        try:
            plan = self.plan(observed, time.time())
            left = await self.applier.apply(job, plan)
        except (Outdated, ApiError) as error:
            again = await self._again(job, error)
            if again is not None or self.world.job(uid) is None:
                return again
            await self.applier.tell_failure(job, error)
            raise
        except Exception as error:
            await self.applier.tell_failure(job, error)
            raise
        job.outdated = 0
        self.world.planned(uid, observed)
        self._writes.start(job, left)
        return plan.recheck_after

    async def _not_written(self, job: Job, action: Action, error: Exception) -> None:
        """A write beside the passes failed: the next pass says what is to be done about it."""
        uid = job.view.uid
        again = await self._again(job, error) if isinstance(error, Outdated | ApiError) else None
        if again is None and self.world.job(uid):
            log.error("a write of job %s failed: %s", job.name, action, exc_info=error)
            words = f"{type(action).__name__} failed: {type(error).__name__}: {error}"
            self.world.create_refused(uid, Refusal.FOR_GOOD, words)
            again = LONGEST_SECONDS
        if again is not None:
            self.changed_within(uid, again)

    async def _again(self, job: Job, error: Outdated | ApiError) -> float | None:
        """Seconds until the job is looked at again after what is part of life; None where that has no remedy, or the
        job is gone."""
        if isinstance(error, Outdated | Conflict):
            job.outdated += 1
            decision("outdated", job.name, why=str(error))
            return float(min(AGAIN_SECONDS * 2**job.outdated, LONGEST_SECONDS))
        if isinstance(error, NotFound):
            return await self._gone(job.view.uid)
        if isinstance(error, Unreachable):
            decision("unreachable", job.name, message=error.message)
            return NOT_NOW_SECONDS
        if isinstance(error, Forbidden | Unauthorized):
            # For a moment after its start the API server doesn't know the roles yet; else the chart's are missing.
            decision("forbidden", job.name, message=error.message)
            return FORBIDDEN_SECONDS
        return None

    async def _gone(self, uid: str) -> float | None:
        """Something was not there. If it is the job, it is forgotten."""
        try:
            return NOT_NOW_SECONDS if await self.check(uid) else None
        except ApiError:
            return NOT_NOW_SECONDS

    async def check(self, uid: str) -> bool:
        """Whether the API server still has the job; forgets it where it has not."""
        job = self.world.job(uid)
        if job is None:
            return False
        try:
            found = await self.applier.client.get(TRAINING_JOBS, job.view.namespace, job.view.name)
            if found["metadata"]["uid"] == uid:
                self.world.hear_job(found)
                return True
        except NotFound:
            pass
        self.forget(uid)
        return False

    def forget(self, uid: str) -> None:
        if job := self.world.job(uid):
            decision("forgotten", job.name, uid=uid)
        self.world.forget_job(uid)
        self._drop(uid)

    def _drop(self, uid: str) -> None:
        self.links.forget(uid)
        self._writes.forget(uid)
