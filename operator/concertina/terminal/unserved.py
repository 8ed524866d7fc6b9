"""Check whether an operator manages a job, from the job's object alone. Pure.

Users can't see the operator's Deployment or Lease, because these are in another namespace.
"""

from __future__ import annotations

from collections.abc import Iterable

from concertina.api.status import ConditionType, JobStatus, unix_seconds
from concertina.durations import duration
from concertina.kube.parse.views import other_manager
from concertina.kube.resources import Raw

SEEN_SECONDS = 15.0
"""Age in seconds of a job or a spec change at which, if it is still unprocessed, no operator is assumed to run.

A running operator reacts within two seconds. A new leader takes over within 10 s.
"""
COUNTED_SECONDS = 300.0
"""Age in seconds of the goodput in a running job's status at which no operator is assumed to run.

A running operator updates this goodput at least once a minute, even with a thousand jobs.
"""


def sentence(job: Raw, status: JobStatus, now: float) -> str:
    """Return a sentence that says that no operator manages the job, with the evidence for this.

    The result is empty if an operator seems to manage the job.
    """
    evidence = _evidence(job, status, now)
    if not evidence:
        return ""
    return (
        f"{evidence}. No operator serves namespace {job['metadata']['namespace']}, or none runs: ask the person "
        "who installed concertina (watchNamespaces and namespaceSelector of its chart say which namespaces are "
        "served)"
    )


def _evidence(job: Raw, status: JobStatus, now: float) -> str:
    meta = job["metadata"]
    if meta.get("deletionTimestamp") or status.is_true(ConditionType.COMPLETE) or status.is_true(ConditionType.FAILED):
        return ""  # An operator does not update such a job.
    if other_manager(job):
        return ""
    if not status.conditions:
        waited = now - unix_seconds(created) if (created := meta.get("creationTimestamp")) else 0.0
        return f"no operator has processed this job for {duration(waited)}" if waited > SEEN_SECONDS else ""
    if (status.observed_generation or 0) < meta.get("generation", 0):
        waited = now - max(_changes(job), default=now)
        return f"no operator has processed the change of {duration(waited)} ago" if waited > SEEN_SECONDS else ""
    if status.is_true(ConditionType.RUNNING) and status.goodput.at:
        waited = now - unix_seconds(status.goodput.at)
        return f"no operator has written its status for {duration(waited)}" if waited > COUNTED_SECONDS else ""
    return ""


def _changes(job: Raw) -> Iterable[float]:
    """Yield the Unix times of changes to the spec, as `managedFields` lists them."""
    for entry in job["metadata"].get("managedFields") or ():
        if entry.get("time") and entry.get("subresource") != "status":
            yield unix_seconds(entry["time"])
