"""Writes of a job's status, which fail if another operator has begun a round since the job was observed.

A round is a period in which a fixed set of replicas trains. The status contains a claim: the operator's decision to
begin a round. A write fails if the stored claim is not the one that the operator observed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from concertina import metrics
from concertina.api.status import ConditionType, rfc3339, unix_seconds
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, TestFailed
from concertina.kube.resources import TRAINING_JOBS, Raw
from concertina.kube.watch.event_recorder import Events
from concertina.plan.actions import Event, Plan
from concertina.plan.observed import JobView
from concertina.turns import FairLimiter
from concertina_protocol.log import log_event
from concertina_protocol.traces import trace_id

SLOTS = 16
"""Largest number of status writes at a time, over all jobs."""
CLAIM_FIELDS = ("round", "claimId", "committed")
"""Fields of `status.world` that identify a claim (the operator's decision to begin a round)."""


class PreconditionFailed(Exception):
    """Error: an observation is outdated. The operator must observe the job and plan again."""


@dataclass(frozen=True)
class StatusChange:
    """Change of a job's status that a plan requires."""

    view: JobView
    tests: list[Raw]
    before: Raw
    wanted: Raw
    only_numbers: bool
    restores: bool
    """True if the change only restores conditions that another client has reverted."""

    @classmethod
    def of(cls, job: CachedJob, plan: Plan) -> StatusChange | None:
        """Return the status change that a plan requires; None if the job already has that status."""
        view, status = job.view, plan.status
        if status is view.status and job.status:
            return None
        new_status, before = status.manifest(), view.status.manifest()
        if new_status == before and job.status:
            return None
        restores = plan.only_conditions and job.taken_back.restores(job.status, new_status)
        return cls(view, claim_tests(job.status), before, new_status, plan.only_numbers, restores)


class StatusWriter:
    """Writer of job statuses, which limits the number of writes at a time."""

    def __init__(self, client: Client, cache: ClusterCache, events: Events) -> None:
        self._client = client
        self._cache = cache
        self._events = events
        self._turns = FairLimiter(SLOTS)
        self._dropped: set[tuple[str, str]] = set()
        """Status fields that the API server has dropped, as namespace of the job and path of the field."""

    def turn(self, job: CachedJob) -> AbstractAsyncContextManager[bool]:
        """Return a context manager for one status write. It yields True if the write had to wait for its turn."""
        return self._turns.turn(job.lane)

    async def write(self, job: CachedJob, change: StatusChange) -> None:
        """Write a change of the job's status.

        Raises:
            PreconditionFailed: When another operator has begun or committed a round since the job was observed (the
                stored claim differs from the observed one). Nothing is written then.
        """
        view, before, new_status = change.view, change.before, change.wanted
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": view.uid},
            *change.tests,
            {"op": "add", "path": "/status", "value": new_status},
        ]
        try:
            stored = await self._client.patch(TRAINING_JOBS, view.namespace, view.name, patch, subresource="status")
        except TestFailed as error:
            self._cache.on_job(await self._client.get(TRAINING_JOBS, view.namespace, view.name))
            raise PreconditionFailed("the claim has changed since it was observed") from error
        self._cache.on_job(stored, only_numbers=change.only_numbers)
        job.taken_back.written(new_status, stored.get("status") or {}, change.restores, time.monotonic())
        _log_changes(job, before, new_status)
        self._warn_of_dropped(view, dropped(new_status, stored.get("status") or {}))

    async def write_failure(self, job: CachedJob, error: Exception) -> None:
        """Report a failed planning pass in a condition, an event and a log line.

        The next successful pass replaces the condition. If the API server refuses to store the condition, this method
        only logs the refusal.
        """
        view = job.view
        message = f"{type(error).__name__}: {str(error)[:600] or 'no words'}"
        sentence = (
            f"the operator failed on this job and retries at increasing intervals ({message}). It leaves the "
            "job's pods unchanged in the meantime. If the message does not say what to do, report this with the "
            "operator's log"
        )
        log_event("reconcile error", **job.named(), message=message)
        conditions, news = failure_conditions(job.status, sentence, view.generation)
        if not news:
            return
        self._events.post(view, Event("Warning", ConditionType.RECONCILE_ERROR, sentence))
        status = job.status or None
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": view.uid},
            {"op": "add", "path": "/status/conditions", "value": conditions}
            if status
            else {"op": "add", "path": "/status", "value": {"conditions": conditions}},
        ]
        try:
            async with self.turn(job):
                stored = await self._client.patch(TRAINING_JOBS, view.namespace, view.name, patch, subresource="status")
            self._cache.on_job(stored)
        except ApiError as refused:
            log_event("reconcile error not told", **job.named(), message=refused.message)

    def _warn_of_dropped(self, view: JobView, paths: tuple[str, ...]) -> None:
        """Report status fields that the API server dropped, once for each field and namespace.

        The usual cause is an old CRD that was not installed by the chart (decision "Version skew between CRD, operator
        and agents"). Each namespace gets its own event, because its users can't see events of other namespaces.
        """
        news = [path for path in paths if (view.namespace, path) not in self._dropped]
        if news:
            self._dropped.update((view.namespace, path) for path in news)
            message = (
                f"the API server does not keep {', '.join(news[:10])}: its CustomResourceDefinition is older than "
                "this operator. Set crds.enabled in the chart's values, or apply the crds/ of this version: "
                "kubectl apply --server-side --force-conflicts -f crds/"
            )
            log_event("outdated crd", job=f"{view.namespace}/{view.name}", message=message)
            self._events.post(view, Event("Warning", "OutdatedCRD", message))


def failure_conditions(status: Raw, sentence: str, generation: int) -> tuple[list[Raw], bool]:
    """Return the conditions of a job whose planning pass failed, and whether they differ from those in `status`.

    Only the conditions Reconciling, ReconcileError and Stalled are changed.
    """
    before = {condition["type"]: condition for condition in status.get("conditions") or ()}
    now = rfc3339(int(time.time()))
    news = False
    if (reconciling := before.get(ConditionType.RECONCILING)) and reconciling.get("status") == "True":
        # Tools keep waiting while Reconciling is true, whatever the value of Stalled.
        stopped = {"status": "False", "reason": ConditionType.RECONCILE_ERROR.value, "message": ""}
        before[ConditionType.RECONCILING] = {**reconciling, **stopped, "lastTransitionTime": now}
    for kind in (ConditionType.RECONCILE_ERROR, ConditionType.STALLED):
        old = before.get(kind) or {}
        changed = old.get("status") != "True"
        news |= changed or old.get("message") != sentence
        before[kind] = {
            "type": kind.value,
            "status": "True",
            "reason": ConditionType.RECONCILE_ERROR.value,
            "message": sentence,
            "lastTransitionTime": now if changed else old["lastTransitionTime"],
            "observedGeneration": generation,
        }
    return list(before.values()), news


def dropped(written: Raw, stored: Raw, path: str = "status") -> tuple[str, ...]:
    """Return the paths of fields in `written` that are missing in `stored`, because the API server dropped them.

    The API server drops fields that its CRD does not define. Only the first entry of each list is compared.
    """
    if written == stored:
        return ()
    missing_paths: list[str] = []
    for name, value in written.items():
        field_path = f"{path}.{name}"
        if name not in stored:
            missing_paths.append(field_path)
            continue
        stored_value = stored[name]
        if isinstance(value, list) and isinstance(stored_value, list) and value and stored_value:
            value, stored_value, field_path = value[0], stored_value[0], f"{field_path}[]"
        if isinstance(value, dict) and isinstance(stored_value, dict):
            missing_paths += dropped(value, stored_value, field_path)
    return tuple(missing_paths)


def claim_tests(status: Raw) -> list[Raw]:
    """Return test operations of a JSON patch that make the patch fail if the stored status is newer than `status`.

    The tests compare the claim (the decision to begin a round), the number of failures and the skipped samples. A test
    of the claim alone is not enough: a late write with the same claim could revert the other two. The messages in the
    claim are not compared, because the API server compares escaped strings, and Go escapes strings differently from
    Python (decision "One status write a pass").
    """
    paths = ("skipped",), ("restarts", "total"), *(("world", "claim", name) for name in CLAIM_FIELDS)
    return list({test["path"]: test for test in (_test(status, path) for path in paths)}.values())


def _test(status: Raw, path: tuple[str, ...]) -> Raw:
    """Return the operation of a JSON patch that tests whether a field of the stored status has its value in `status`.

    If the field or its parent is absent in `status`, the operation tests that the field is absent.
    """
    value: Any = status or None
    pointer = "/status"
    for name in path:
        if not isinstance(value, Mapping):
            break
        value, pointer = value.get(name), f"{pointer}/{name}"
    return {"op": "test", "path": pointer, "value": value}


def _log_changes(job: CachedJob, before: Raw, after: Raw) -> None:
    """Log the differences between two statuses: a new claim of a round, its commit, and changed conditions."""
    old, new = before.get("world") or {}, after.get("world") or {}
    claim = new.get("claim") or {}
    if claim and claim["claimId"] != (old.get("claim") or {}).get("claimId"):
        log_event("claimed", **job.named(claim["round"]), claim=claim["claimId"], reason=claim.get("reason"))
    if new.get("round") != old.get("round"):
        members = [member["replica"] for member in new.get("members") or ()]
        if claim.get("at") and new.get("since"):
            seconds = max(0.0, unix_seconds(new["since"]) - unix_seconds(claim["at"]))
            metrics.ROUND_PREPARE_SECONDS.observe(seconds, {"trace_id": trace_id(job.view.uid, new["round"])})
        log_event("committed", **job.named(new.get("round")), members=members or new.get("replicas"))
    was = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    for condition in after.get("conditions") or ():
        if was.get(condition["type"]) != (condition["status"], condition["reason"]):
            shown = {key: condition.get(key) for key in ("status", "reason", "message")}
            log_event("condition", **job.named(), type=condition["type"], **shown)
