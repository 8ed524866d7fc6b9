"""The one write of a pass to its job: the status, on the condition that the claim is the one that was observed."""

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
"""Writes of a status that are under way at most, of all jobs together."""
CLAIM_FIELDS = ("round", "claimId", "committed")
"""Of a claim; what makes it another one."""


class PreconditionFailed(Exception):
    """Something that was observed is no longer so: observe and plan again."""


@dataclass(frozen=True)
class StatusChange:
    view: JobView
    tests: list[Raw]
    before: Raw
    wanted: Raw
    only_numbers: bool
    restores: bool
    """Whether it only says again what another client has taken back since."""

    @classmethod
    def of(cls, job: CachedJob, plan: Plan) -> StatusChange | None:
        """None where the job has that status already: the very same object, as a pass in which nothing has changed
        gives it back, or its equal."""
        view, status = job.view, plan.status
        if status is view.status and job.status:
            return None
        wanted, before = status.manifest(), view.status.manifest()
        if wanted == before and job.status:
            return None
        restores = plan.only_conditions and job.taken_back.restores(job.status, wanted)
        return cls(view, claim_tests(job.status), before, wanted, plan.only_numbers, restores)


class StatusWriter:
    def __init__(self, client: Client, cache: ClusterCache, events: Events) -> None:
        self._client = client
        self._cache = cache
        self._events = events
        self._turns = FairLimiter(SLOTS)
        self._dropped: set[tuple[str, str]] = set()
        """(namespace, path) of fields of the status that the API server was seen to drop."""

    def turn(self, job: CachedJob) -> AbstractAsyncContextManager[bool]:
        """For one write, which is made within; whether it had to be waited for."""
        return self._turns.turn(job.lane)

    async def write(self, job: CachedJob, change: StatusChange) -> None:
        """Raises PreconditionFailed where the claim is not the one that was observed; then nothing is written."""
        view, before, wanted = change.view, change.before, change.wanted
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": view.uid},
            *change.tests,
            {"op": "add", "path": "/status", "value": wanted},
        ]
        try:
            stored = await self._client.patch(TRAINING_JOBS, view.namespace, view.name, patch, subresource="status")
        except TestFailed as error:
            self._cache.on_job(await self._client.get(TRAINING_JOBS, view.namespace, view.name))
            raise PreconditionFailed("the claim is not the one that was observed") from error
        self._cache.on_job(stored, only_numbers=change.only_numbers)
        job.taken_back.written(wanted, stored.get("status") or {}, change.restores, time.monotonic())
        _log_changes(job, before, wanted)
        self._warn_of_dropped(view, dropped(wanted, stored.get("status") or {}))

    async def write_failure(self, job: CachedJob, error: Exception) -> None:
        """A condition, an event and a line of the log for a pass that raised; the conditions of the next one that does
        not take its place. Best effort: whatever made the pass fail must not keep this from being tried."""
        view = job.view
        message = f"{type(error).__name__}: {str(error)[:600] or 'no words'}"
        sentence = (
            f"the operator failed on this job and tries again, ever more rarely ({message}). Its pods are left as they "
            "are meanwhile. Report this with the operator's log, unless the words say what to do"
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
        """Warn once of each field in each namespace, on the job that it was seen on.

        An older CRD is common, as helm upgrade leaves CRDs alone (decision "Versions beside each other"). Users of a
        namespace do not see another's events, and a namespace that is being deleted takes none.
        """
        news = [path for path in paths if (view.namespace, path) not in self._dropped]
        if news:
            self._dropped.update((view.namespace, path) for path in news)
            message = (
                f"the API server does not keep {', '.join(news[:10])}: its CustomResourceDefinition is older than "
                "this operator. Apply the crds/ of this version, which helm upgrade leaves as they are: "
                "kubectl apply --server-side --force-conflicts -f crds/"
            )
            log_event("outdated crd", job=f"{view.namespace}/{view.name}", message=message)
            self._events.post(view, Event("Warning", "OutdatedCRD", message))


def failure_conditions(status: Raw, sentence: str, generation: int) -> tuple[list[Raw], bool]:
    """The conditions of a job whose pass raised: as they were, but for three; and whether that is news."""
    before = {condition["type"]: condition for condition in status.get("conditions") or ()}
    now = rfc3339(int(time.time()))
    news = False
    if (reconciling := before.get(ConditionType.RECONCILING)) and reconciling.get("status") == "True":
        # A tool that sees it waits on, whatever Stalled says.
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


def dropped(wanted: Raw, stored: Raw, path: str = "status") -> tuple[str, ...]:
    """Paths of fields that were written and are not there; of lists, of their first entry."""
    if wanted == stored:
        return ()
    found: list[str] = []
    for name, value in wanted.items():
        here = f"{path}.{name}"
        if name not in stored:
            found.append(here)
            continue
        kept = stored[name]
        if isinstance(value, list) and isinstance(kept, list) and value and kept:
            value, kept, here = value[0], kept[0], f"{here}[]"
        if isinstance(value, dict) and isinstance(kept, dict):
            found += dropped(value, kept, here)
    return tuple(found)


def claim_tests(status: Raw) -> list[Raw]:
    """The part of a JSON patch that holds only while `status.world.claim`, the number of failures and the samples left
    out are those in `status`: between two claims a deposed operator's late write would take back what has been counted.

    Its texts are left out: the API server compares strings as they are escaped, and Go's way is not Python's (decision
    "One status write a pass")."""
    paths = ("skipped",), ("restarts", "total"), *(("world", "claim", name) for name in CLAIM_FIELDS)
    return list({test["path"]: test for test in (_test(status, path) for path in paths)}.values())


def _test(status: Raw, path: tuple[str, ...]) -> Raw:
    """That the field is as it is in `status`; where it or what holds it is absent, that this is absent."""
    value: Any = status or None
    at = "/status"
    for name in path:
        if not isinstance(value, Mapping):
            break
        value, at = value.get(name), f"{at}/{name}"
    return {"op": "test", "path": at, "value": value}


def _log_changes(job: CachedJob, before: Raw, after: Raw) -> None:
    """A line for each round claimed or committed, and for each condition that changed."""
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
