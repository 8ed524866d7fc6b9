"""Jobs that wait for room in the cluster, and whose turn it is (`plan/lifecycle/line.py`)."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from decimal import Decimal

from concertina.controller.cache.job import CachedJob
from concertina.kube.parse.room import fits_quota
from concertina.plan.lifecycle import line
from concertina.plan.lifecycle.admission import by_quota, hindrance
from concertina.plan.lifecycle.line import Waiting
from concertina.plan.observed import NodeView, QueuePlace

log = logging.getLogger(__name__)
FOLD_SECONDS = 0.2
"""From a change until the line is worked out: a burst folds into one time."""
SLICE_SECONDS = 0.01
"""For which jobs are judged in one go, before other work of the event loop has its turn."""

ALONE = QueuePlace()

Later = Callable[[float, Callable[[], None]], object]
"""Calls something after so many seconds, as `loop.call_later`."""


def at_once(seconds: float, act: Callable[[], None]) -> None:
    """Call without a delay: the `Later` of a cache without an event loop."""
    act()


class CapacityQueue:
    """The line is worked out once for a burst of changes. `changed(uid)` is called for each job that has something to
    do because its place is another one: it begins its turn, makes way, or may make pods again."""

    def __init__(
        self,
        jobs: Mapping[str, CachedJob],
        nodes: Mapping[str, NodeView] | None,
        changed: Callable[[str], None],
        later: Later,
    ) -> None:
        """`nodes`: None where they are not watched."""
        self._jobs = jobs
        self._nodes = nodes
        self._changed = changed
        self._later = later
        self._scheduled = False
        self._stale: set[str] = set()
        """Jobs to be judged again."""
        self._waiting: dict[str, Waiting] = {}
        """By uid; right but for those in `_stale`."""
        self._requests: dict[str, Mapping[str, Decimal]] = {}
        """Of the pods of waiting jobs, by uid: a job that holds no pods still has a size."""
        self._line = line.EMPTY
        self._unanswered: set[str] = set()
        """Jobs that were told that their place is not known yet."""

    def job_changed(self, uid: str) -> None:
        """Something is new about the job, or it is gone."""
        self._stale.add(uid)
        self._schedule()

    def room_changed(self) -> None:
        """Of the nodes: which job is too large may be news."""
        self._stale.update(self._waiting)
        self._schedule()

    def place(self, uid: str) -> QueuePlace | None:
        """Return the job's place. None where the line has not been worked out since the job itself changed; then
        `changed(uid)` follows."""
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
        """Not to a job that has nothing to release and nothing to try: it goes on waiting until its turn comes."""
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
        """Return how the job waits for room. None where it does not wait, or can't be judged: one such job must not
        fail the others."""
        try:
            waits = line.waiting(job.view, job.pods.values(), by_quota(job.refused))
            if waits is None:
                return None
            if waits.away:  # what once kept it from starting is seen again when it tries
                return dataclasses.replace(waits, requests=self._requests.get(uid, {}))
            quota = fits_quota(job.refused.message) if job.refused else None
            return dataclasses.replace(waits, hindrance=hindrance(waits.least, job.pods.values(), self._nodes, quota))
        except Exception:
            log.exception("whether job %s waits for room can't be told; nobody waits for it", job.name)
            return None
