"""One pass for one job: observe, plan, apply. Every trigger, whatever it is, ends up here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from concertina.apply import Applier, Outdated
from concertina.cluster.errors import Forbidden, Invalid, NotFound, Unauthorized, Unreachable
from concertina.cluster.resources import TRAINING_JOBS
from concertina.control.links import Links
from concertina.journal import decision
from concertina.plan.types import Observed, Plan
from concertina.world import World

NOT_NOW_SECONDS = 1.0
"""Until the next try while the Lease is in doubt or the API server is away."""
AGAIN_SECONDS = 0.02
"""Until a pass whose precondition was lost is made again; doubled each time that follows."""
REFUSED_SECONDS = 30.0
FORBIDDEN_SECONDS = 3.0
Planner = Callable[[Observed, float], Plan]


@dataclass
class Reconciler:
    world: World
    links: Links
    applier: Applier
    plan: Planner
    may_act: Callable[[], bool]
    """False while another operator may be the one that acts."""
    passes: int = 0

    async def run(self, uid: str) -> float | None:
        """The work of the queue: seconds until the job is due again, or None."""
        job = self.world.job(uid)
        if job is None:
            self.links.forget(uid)
            return None
        if not self.may_act():
            return NOT_NOW_SECONDS
        self.passes += 1
        self.links.open(uid, job.view.created)
        observed = self.world.observe(uid)
        assert observed is not None
        plan = self.plan(observed, time.time())
        try:
            await self.applier.apply(job, plan)
        except Outdated as error:
            job.outdated += 1
            decision("outdated", job.name, why=str(error))
            return float(min(AGAIN_SECONDS * 2**job.outdated, REFUSED_SECONDS))
        except NotFound:
            return await self._gone(uid)
        except Invalid as error:
            decision("refused", job.name, message=error.message)
            return REFUSED_SECONDS
        except Unreachable as error:
            decision("unreachable", job.name, message=error.message)
            return NOT_NOW_SECONDS
        except (Forbidden, Unauthorized) as error:
            # For a moment after its start the API server doesn't know the roles yet; else the chart's are missing.
            decision("forbidden", job.name, message=error.message)
            return FORBIDDEN_SECONDS
        job.outdated = 0
        self.world.planned(uid, observed)
        return plan.recheck_after

    async def _gone(self, uid: str) -> float | None:
        """Something was not there. If it is the job, it is forgotten."""
        if not await self.check(uid):
            return None
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
        self.links.forget(uid)
