"""Jobs that wait for room in the cluster, and the order of their turns (`plan/lifecycle/line.py`)."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from decimal import Decimal

from concertina.controller.cache.job import CachedJob
from concertina.controller.cache.timers import Later
from concertina.kube.parse.room import fits_quota
from concertina.plan.lifecycle import line
from concertina.plan.lifecycle.admission import by_quota, hindrance
from concertina.plan.lifecycle.line import Waiting
from concertina.plan.observed import NodeView, QueuePlace

log = logging.getLogger(__name__)
FOLD_SECONDS = 0.2
"""Delay in seconds from a change until the queue is computed, so that a burst of changes needs one computation."""
SLICE_SECONDS = 0.01
"""Time in seconds for which jobs are judged without a break, before the event loop continues with other work."""

ALONE = QueuePlace()


class CapacityQueue:
    """Queue of the jobs that wait for room, computed once for a burst of changes.

    It calls `changed(uid)` for each job that must act because its place has changed: the job begins its turn, makes
    room, or may create pods again.
    """

    def __init__(
        self,
        jobs: Mapping[str, CachedJob],
        nodes: Mapping[str, NodeView] | None,
        changed: Callable[[str], None],
        later: Later,
        has_queue: Callable[[CachedJob], bool] = lambda job: False,
    ) -> None:
        """Start with an empty queue.

        Args:
            nodes: Nodes by name, or None when nodes are not watched.
            has_queue: Whether a queue of Kueue decides when a job starts. Such a job has no turns here.
        """
        self._has_queue = has_queue
        self._jobs = jobs
        self._nodes = nodes
        self._changed = changed
        self._later = later
        self._scheduled = False
        self._stale: set[str] = set()
        """Jobs that must be judged again."""
        self._waiting: dict[str, Waiting] = {}
        """Waiting jobs by uid, up to date except for those in `_stale`."""
        self._requests: dict[str, Mapping[str, Decimal]] = {}
        """Requests of one pod of each waiting job, by uid. A job without pods still has a size."""
        self._line = line.EMPTY
        self._unanswered: set[str] = set()
        """Jobs whose place was asked for while it was not known."""

    def job_changed(self, uid: str) -> None:
        """Judge the job again, because it has changed or is gone."""
        self._stale.add(uid)
        self._schedule()

    def room_changed(self) -> None:
        """Judge all waiting jobs again, because nodes have changed: other jobs may be too large now."""
        self._stale.update(self._waiting)
        self._schedule()

    def place(self, uid: str) -> QueuePlace | None:
        """Return the job's place, or None when the queue has not been computed since the job itself changed.

        In that case, `changed(uid)` follows.
        """
        if uid in self._stale:
            self._judge(uid)
        waits = self._waiting.get(uid)
        if waits is None:
            return ALONE
        if self._line.jobs.get(uid) != waits:
            self._unanswered.add(uid)
            self._schedule()
            return None
        return self._line.places.get(uid, ALONE)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._later(FOLD_SECONDS, self._work_out)

    def _work_out(self) -> None:
        until = time.monotonic() + SLICE_SECONDS
        while self._stale:
            self._judge(next(iter(self._stale)))
            if self._stale and time.monotonic() > until:
                self._later(0.0, self._work_out)
                return
        self._scheduled = False
        before = self._line.places
        if self._waiting != self._line.jobs:
            self._line = line.worked_out(self._waiting, self._line)
        unanswered, self._unanswered = self._unanswered, set()
        for uid in [uid for uid in self._waiting if uid in unanswered or self._is_news(uid, before)]:
            self._changed(uid)

    def _is_news(self, uid: str, before: Mapping[str, QueuePlace]) -> bool:
        """Return whether a job must act on its new place.

        A job that has nothing to release and nothing to try continues to wait until its turn.
        """
        waits, old, new = self._waiting[uid], before.get(uid, ALONE), self._line.places.get(uid, ALONE)
        if not (waits.held or waits.away or waits.turn or new.turn):
            return False
        return (old.turn, old.ahead is None, old.hindrance) != (new.turn, new.ahead is None, new.hindrance)

    def _judge(self, uid: str) -> None:
        self._stale.discard(uid)
        job = self._jobs.get(uid)
        waits = self._judged(uid, job) if job else None
        if waits is None:
            self._waiting.pop(uid, None)
            self._requests.pop(uid, None)
        else:
            self._waiting[uid] = waits
            self._requests[uid] = waits.requests

    def _judged(self, uid: str, job: CachedJob) -> Waiting | None:
        """Return how the job waits for room, or None when it does not wait or cannot be judged.

        One job that cannot be judged must not make the other jobs fail.
        """
        try:
            if self._has_queue(job):
                return None
            waits = line.waiting(job.view, job.pods.values(), by_quota(job.refused))
            if waits is None:
                return None
            if waits.away:  # an earlier hindrance is found again when the job tries to start
                return dataclasses.replace(waits, requests=self._requests.get(uid, {}))
            quota = fits_quota(job.refused.message) if job.refused else None
            return dataclasses.replace(waits, hindrance=hindrance(waits.least, job.pods.values(), self._nodes, quota))
        except Exception:
            log.exception("whether job %s waits for room can't be told; nobody waits for it", job.name)
            return None
