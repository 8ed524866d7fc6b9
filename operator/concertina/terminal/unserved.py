"""Judge whether an operator looks after a job, as far as the job itself shows it. Pure.

Users see neither the operator's Deployment nor its Lease, which are in another namespace.
"""

from __future__ import annotations

from collections.abc import Iterable

from concertina.api.status import ConditionType, JobStatus, unix_seconds
from concertina.durations import duration
from concertina.kube.parse.views import other_manager
from concertina.kube.resources import Raw

SEEN_SECONDS = 15.0
"""Seconds after which a job or a change that no operator has handled counts as evidence.

An operator answers within a second or two, and a successor takes over within 10 s.
"""
COUNTED_SECONDS = 300.0
"""Seconds after which a status that was not written counts as evidence.

The status of a job that trains is written at least once a minute, even beside a thousand other jobs.
"""


def sentence(job: Raw, status: JobStatus, now: float) -> str:
    """Return a sentence that no operator serves the job, with the evidence.

    The sentence is empty if an operator seems to serve the job.
    """
    evidence = _evidence(job, status, now)
    if not evidence:
        return ""
    return (
        f"{evidence}. No operator serves namespace {job['metadata']['namespace']}, or none runs: ask whoever installed "
        "concertina (watchNamespaces and namespaceSelector of its chart say which namespaces are served)"
    )


def _evidence(job: Raw, status: JobStatus, now: float) -> str:
    meta = job["metadata"]
    if meta.get("deletionTimestamp") or status.is_true(ConditionType.COMPLETE) or status.is_true(ConditionType.FAILED):
        return ""  # An operator has nothing to write for such a job.
    if other_manager(job):
        return ""
    if not status.conditions:
        waited = now - unix_seconds(created) if (created := meta.get("creationTimestamp")) else 0.0
        return f"no operator has looked at this job in {duration(waited)}" if waited > SEEN_SECONDS else ""
    if (status.observed_generation or 0) < meta.get("generation", 0):
        waited = now - max(_changes(job), default=now)
        return f"no operator has seen the change of {duration(waited)} ago" if waited > SEEN_SECONDS else ""
    if status.is_true(ConditionType.RUNNING) and status.goodput.at:
        waited = now - unix_seconds(status.goodput.at)
        return f"no operator has written its status for {duration(waited)}" if waited > COUNTED_SECONDS else ""
    return ""


def _changes(job: Raw) -> Iterable[float]:
    """Yield the Unix times at which the spec was written, by the last writer of each of its fields."""
    for entry in job["metadata"].get("managedFields") or ():
        if entry.get("time") and entry.get("subresource") != "status":
            yield unix_seconds(entry["time"])
