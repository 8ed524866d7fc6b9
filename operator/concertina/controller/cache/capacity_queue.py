"""Jobs that wait for room in the cluster, so that one may make way for another (`plan/lifecycle/gang.py`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from concertina.controller.cache.job import CachedJob
from concertina.kube.parse.room import fits_quota
from concertina.plan.lifecycle.admission import Waiting, by_quota, waiting
from concertina.plan.lifecycle.room import hindrance
from concertina.plan.observed import Competitor, Hindrance, NodeView

log = logging.getLogger(__name__)


class CapacityQueue:
    """`changed(uid)` is called for each job to which who else waits is news. Who waits is worked out when it is asked,
    and only for jobs of which something is new: a burst of events of a thousand pods would do it a thousand times."""

    def __init__(
        self, jobs: Mapping[str, CachedJob], nodes: Mapping[str, NodeView] | None, changed: Callable[[str], None]
    ) -> None:
        """`nodes`: None where they are not watched."""
        self._jobs = jobs
        self._nodes = nodes
        self._changed = changed
        self._waiting: dict[str, Waiting] = {}
        """By uid; right but for those in `_stale`."""
        self._stale: set[str] = set()

    def job_changed(self, uid: str) -> None:
        self._stale.add(uid)

    def room_changed(self) -> None:
        """Of the nodes: which job is too large may be news."""
        for uid in self._waiting:
            self._stale.add(uid)
            self._changed(uid)

    def competitors(self, uid: str) -> tuple[Competitor, ...]:
        """Other jobs that wait for room which this one could make; none where this one does not wait."""
        self._stale.add(uid)
        while self._stale:
            self.update(self._stale.pop())
        mine = self._waiting.get(uid)
        if mine is None:
            return ()
        return tuple(
            other.competitor
            for name, other in self._waiting.items()
            if name != uid and other.needs_room_in(mine.competitor.namespace)
        )

    def hindrance(self, uid: str) -> Hindrance | None:
        waits = self._waiting.get(uid)
        return waits.hindrance if waits else None

    def update(self, uid: str) -> None:
        """Whether that job waits for room; where that is news, those who hold room in vain, or none, look again."""
        job, before = self._jobs.get(uid), self._waiting.pop(uid, None)
        now = self._judged(job) if job else None
        if now is not None:
            self._waiting[uid] = now
        if (now and (now.competitor, now.hindrance)) == (before and (before.competitor, before.hindrance)):
            return
        for name, other in self._waiting.items():
            if name != uid and (other.held or other.away):
                self._changed(name)

    def _judged(self, job: CachedJob) -> Waiting | None:
        """None, too, where it can't be judged: it is another job's pass that asks, which must not fail for that."""
        try:
            found = waiting(job.view, job.pods.values(), by_quota(job.refused))
            if found is None:
                return None
            quota = fits_quota(job.refused.message) if job.refused else None
            return dataclasses.replace(found, hindrance=hindrance(found.least, job.pods.values(), self._nodes, quota))
        except Exception:
            log.exception("whether job %s waits for room can't be told; nobody waits for it", job.name)
            return None
