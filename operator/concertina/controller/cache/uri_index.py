"""Live jobs by the checkpoint.uri that they write to: the oldest has it, the others wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from concertina.controller.cache.job import CachedJob


class UriIndex:
    """`changed(uid)` is called for each other job that may have the URI now, or no longer."""

    def __init__(self, jobs: Mapping[str, CachedJob], changed: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._changed = changed
        self._uri_of: dict[str, str] = {}
        self._users: dict[str, set[str]] = {}

    def update(self, uid: str) -> None:
        """The job's URI may have changed, or the job may be gone."""
        job, before = self._jobs.get(uid), self._uri_of.pop(uid, None)
        now = job.uri if job else None
        if now is not None:
            self._uri_of[uid] = now
        if now == before:
            return
        if before is not None:
            self._users[before].discard(uid)
        if now is not None:
            self._users.setdefault(now, set()).add(uid)
        for uri in (before, now):
            if uri is not None:
                for other in self._users[uri] - {uid}:
                    self._changed(other)
                if not self._users[uri]:
                    del self._users[uri]

    def holder(self, uid: str) -> str:
        """namespace/name of an older job with the same URI; empty where there is none."""
        users = self._users.get(self._uri_of.get(uid, ""), set())
        oldest = min(users, key=lambda user: (self._jobs[user].view.created, user), default=uid)
        return "" if oldest == uid else self._jobs[oldest].name
