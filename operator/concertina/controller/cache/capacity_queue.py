"""Queue of the jobs whose pods wait for resources of the cluster.

`plan/lifecycle/line.py` defines the order in which the jobs have their turns.
"""

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
"""Delay in seconds between a change and the computation of the queue.

All changes in this time cause one computation.
"""
SLICE_SECONDS = 0.01
"""Seconds for which the queue evaluates jobs before other tasks of the event loop run."""

ALONE = QueuePlace()


class CapacityQueue:
    """Queue of the jobs that wait for resources. Changes of jobs or nodes cause a new computation of each job's place.

    Waiting jobs have turns: in its turn, a job may keep its pods while other jobs release their pods. The queue calls
    `changed(uid)` for each job that must act because its place has changed: the job's turn begins, the job must release
    its pods, or the job may create pods again. Several changes in quick succession cause one computation.
    """

    def __init__(
        self,
        jobs: Mapping[str, CachedJob],
        nodes: Mapping[str, NodeView] | None,
        changed: Callable[[str], None],
        later: Later,
        has_queue: Callable[[CachedJob], bool] = lambda job: False,
    ) -> None:
        """Create an empty queue of jobs that wait for resources.

        Args:
            jobs: All jobs, keyed by uid.
            nodes: Nodes, keyed by name; None if nodes are not watched.
            changed: Function to call with the uid of each job that must act because its place has changed.
            later: Function that schedules a call after a delay.
            has_queue: Function that returns whether a Kueue queue decides when a job starts. Such a job never waits
                here.
        """
        self._has_queue = has_queue
        self._jobs = jobs
        self._nodes = nodes
        self._changed = changed
        self._later = later
        self._scheduled = False
        self._stale: set[str] = set()
        """Uids of the jobs that must be evaluated again."""
        self._waiting: dict[str, Waiting] = {}
        """Data of the waiting jobs, keyed by uid. The data of jobs in `_stale` may be out of date."""
        self._requests: dict[str, Mapping[str, Decimal]] = {}
        """Resource requests of one pod of each waiting job, by the job's uid.

        The entry of a job remains after the job has released its pods.
        """
        self._line = line.EMPTY
        self._unanswered: set[str] = set()
        """Uids of the jobs for which `place` returned None. `changed` is called for them once their place is known."""

    def job_changed(self, uid: str) -> None:
        """Schedule a new evaluation of whether a job waits for resources, after the job has changed or was deleted."""
        self._stale.add(uid)
        self._schedule()

    def room_changed(self) -> None:
        """Schedule a new evaluation of all waiting jobs after a change of nodes.

        A waiting job that did not fit on the nodes may fit now, and another waiting job may no longer fit.
        """
        self._stale.update(self._waiting)
        self._schedule()

    def place(self, uid: str) -> QueuePlace | None:
        """Return the job's place in the queue; None if it has not been computed since the job's last change.

        After the result None, the queue calls `changed(uid)` as soon as the place is computed.
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
        """Return whether a job must act because its place in the queue has changed.

        `before` contains the previous places. A job without pods that has not released any must act only when its turn
        begins or ends.
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
        """Return the data that determine a job's place in the queue; None if the job does not wait for resources.

        If an error occurs, the result is None too, so that an error about one job does not affect other jobs.
        """
        try:
            if self._has_queue(job):
                return None
            waits = line.waiting(job.view, job.pods.values(), by_quota(job.refused))
            if waits is None:
                return None
            if waits.away:  # the reason why room does not help is found again when the job tries to start
                return dataclasses.replace(waits, requests=self._requests.get(uid, {}))
            quota = fits_quota(job.refused.message) if job.refused else None
            return dataclasses.replace(waits, hindrance=hindrance(waits.least, job.pods.values(), self._nodes, quota))
        except Exception:
            log.exception("can't find out whether job %s waits for room: it is treated as not waiting", job.name)
            return None
