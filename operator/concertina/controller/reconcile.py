"""Planning pass for one job: observe the job, make a plan, and apply the plan.

Every event about a job causes a pass.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import concertina_protocol as protocol
from concertina import backoff, metrics
from concertina.agents.connections import AgentConnections
from concertina.controller import evaluation_jobs
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.cache.job import CachedJob
from concertina.controller.claims import count_gpus, unread
from concertina.controller.master_keys import MasterKeys
from concertina.controller.silence_limit import SilenceLimit
from concertina.controller.status_patches import PreconditionFailed, StatusChange, StatusWriter
from concertina.controller.tracing import Export
from concertina.controller.writes import ObjectWriter, WriteQueue
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, Conflict, Forbidden, NotFound, Unauthorized, Unreachable
from concertina.kube.resources import TRAINING_JOBS
from concertina.kube.watch.event_recorder import Events
from concertina.plan.actions import Action, Event, Plan, Send
from concertina.plan.observed import JobObservation, Refusal
from concertina_protocol.log import log_event

log = logging.getLogger(__name__)
NOT_NOW_SECONDS = 1.0
"""Seconds before the next planning pass if the Lease may be lost or the API server is unreachable."""
AGAIN_SECONDS = 0.02
"""Shortest delay in seconds before a planning pass with an outdated observation is repeated."""
LONGEST_SECONDS = 30.0
FORBIDDEN_SECONDS = 3.0
SERVED_BY_ANOTHER = Event(
    "Warning",
    "ServedByAnotherOperator",
    "another operator writes the status of this job, and this one does not have the job's master key, so two "
    "installations serve the same namespace. This one leaves such jobs alone and reports it once; the metric "
    "concertina_jobs_of_another_operator counts them. Give each release namespaces of its own "
    "(watchNamespaces), or uninstall one of them",
)
Planner = Callable[[JobObservation, float], Plan]


@dataclass(frozen=True)
class _Decision:
    """Plan of a planning pass, with the observation from which it was made."""

    observed: JobObservation
    plan: Plan
    change: StatusChange | None
    at: float
    """Monotonic time at which the job was observed."""


def _most_members(job: CachedJob) -> int:
    """Return the largest number of members that a report of the job's agents may contain.

    This number limits the amount of data that the operator accepts from an agent. Only pods with an IP address count.
    Otherwise, a job with one running pod could request a thousand replicas, and its agent could report a thousand
    members.
    """
    return max(sum(bool(pod.ip) for pod in job.pods.values()), len(job.view.status.world.members))


@dataclass
class Reconciler:
    """Runs the planning passes of all jobs."""

    cache: ClusterCache
    connections: AgentConnections
    client: Client
    status: StatusWriter
    objects: ObjectWriter
    events: Events
    plan: Planner
    keys: MasterKeys
    trace: Export | None
    """Function that exports traces; None if tracing is off."""
    may_act: Callable[[], bool]
    """Function that returns whether this operator process may perform actions.

    It returns False while another operator process may be the leader.
    """
    changed_within: Callable[[str, float], None]
    """Function that schedules a job's next planning pass to run within a number of seconds."""
    look_for_queues: Callable[[], Awaitable[None]]
    """Coroutine function that returns once it is known whether the API server serves Kueue's API."""
    silence: SilenceLimit = field(default_factory=SilenceLimit)
    passes: int = 0
    of_another: set[str] = field(default_factory=set)
    """Uids of jobs that another operator serves, and whose master key this operator lacks."""
    _deciding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that lets only one planning pass make decisions at a time.

    Between two decisions, the event loop runs its other waiting tasks.
    """

    def __post_init__(self) -> None:
        self._writes = WriteQueue(
            self.objects.write, self._not_written, lambda uid: self.changed_within(uid, 0.0), self.may_act
        )
        self._reported_other_operator = False

    def close(self) -> None:
        self._writes.close()

    async def run(self, uid: str) -> float | None:
        """Run one planning pass for the job.

        Return the seconds until the job's next pass; None if only an event causes it.

        Raises:
            ApiError: When `_again` does not expect the error. The job's status already reports the error.
        """
        job = self.cache.job(uid)
        if job is None:
            self._drop(uid)
            return None
        if not self.may_act():
            return NOT_NOW_SECONDS
        self.passes += 1
        key = self.keys.of(job.view.status.master_key)
        if yield_seconds := self._yield_seconds(job, key):
            return yield_seconds
        if key is not None:
            await self.connections.open(uid, job.view.created, key, job.view.namespace, _most_members(job))
        try:
            if job.view.queue and not job.queue_looked_for:
                await self.look_for_queues()
                job.queue_looked_for = True
            await count_gpus(self.client, job)
            evaluation_jobs.look_if_due(self.client, job, lambda changed: self.changed_within(changed, 0.0))
            if (decision := await self._written(job)) is not None:
                self._say(job, decision.plan)
        except (PreconditionFailed, ApiError) as error:
            metrics.RECONCILE_ABORTED.labels(type(error).__name__).inc()
            retry_seconds = await self._again(job, error)
            if retry_seconds is not None or self.cache.job(uid) is None:
                return retry_seconds
            await self.status.write_failure(job, error)
            raise
        except Exception as error:
            await self.status.write_failure(job, error)
            raise
        if decision is None:  # the job was deleted meanwhile
            self._drop(uid)
            return None
        job.preconditions_failed = 0
        self.cache.planned(uid, decision.observed)
        self._give_up_silent(job, decision.plan)
        self._writes.start(job, (action for action in decision.plan.actions if not isinstance(action, Send)))
        return decision.plan.recheck_after

    def _yield_seconds(self, job: CachedJob, key: bytes | None) -> float:
        """Return the seconds for which this operator must not act, because another one may manage the job.

        The result is 0.0 if this operator has the job's master key, or if no other operator seems to manage the job.
        """
        uid, seconds = job.view.uid, 0.0
        if key is None:
            seconds = job.taken_back.yield_seconds_left(job.status, time.monotonic())
        if not seconds:
            self.of_another.discard(uid)
        elif uid not in self.of_another:
            log_event("served by another operator", **job.named(), key=job.view.status.master_key)
            if not self._reported_other_operator:
                self._reported_other_operator = True
                self.events.post(job.view, SERVED_BY_ANOTHER)
            self.of_another.add(uid)
        return seconds

    async def _written(self, job: CachedJob) -> _Decision | None:
        """Make a plan and write the job's status. Return the plan, or None if the job no longer exists.

        If the status write fails, the planning pass performs no other action. A pass that is based on an outdated
        observation therefore does no harm (decision "One status write a pass").

        Raises:
            PreconditionFailed: When the status cannot be written because the observation is outdated.
        """
        decision = await self._decide(job)
        if decision is None or decision.change is None:
            return decision
        async with self.status.turn(job) as waited:
            if waited:  # see decision "A pass that waited to write makes a new plan"
                decision = await self._decide(job)
            if decision is not None and decision.change is not None:
                await self.status.write(job, decision.change)
                if counted := decision.plan.status.goodput.at:
                    job.counted = counted, decision.at
        return decision

    async def _decide(self, job: CachedJob) -> _Decision | None:
        async with self._deciding:
            await asyncio.sleep(0)
            return self._decide_now(job)

    def _decide_now(self, job: CachedJob) -> _Decision | None:
        """Observe the job and make a plan. Return None if the job no longer exists.

        Raises:
            PreconditionFailed: When another operator may be the leader, or resource claims must be read first.
        """
        if not self.may_act():  # another operator may have become the leader while this pass waited
            raise PreconditionFailed("another operator may be the leader by now")
        if (cached := self.cache.job(job.view.uid)) is not None and unread(cached.view):
            raise PreconditionFailed("the spec has changed, so its claims must be read first")
        # Thread time does not include the time in which the process was stopped.
        observed_at, begun = time.monotonic(), time.thread_time()
        observed = self.cache.observe(job.view.uid)
        if observed is None:
            return None
        plan = self.plan(observed, time.time())
        job.decided_in = time.thread_time() - begun
        change = StatusChange.of(job, plan)
        if (
            change is not None
            and change.restores
            and (wait_seconds := job.taken_back.restore_seconds_left(observed_at))
        ):
            change = None
            plan = replace(plan, events=(), recheck_after=min(wait_seconds, plan.recheck_after or wait_seconds))
        return _Decision(observed, plan, change, observed_at)

    def _say(self, job: CachedJob, plan: Plan) -> None:
        """Start the plan's calls to agents, and queue its Kubernetes events, in the order of plan/actions.py.

        Calls and events are sent in the background, so that no planning pass waits for them.
        """
        uid = job.view.uid
        self.connections.keep(uid, {pod.name for pod in job.pods.values()} | plan.watch.keys())
        for send in self.connections.send(uid, (action for action in plan.actions if isinstance(action, Send))):
            kind, message = type(send.message).__name__.lower(), send.message
            log_event(kind, **job.named(message.round), replica=send.replica, claim=message.claim)
            job.asked = job.asked or isinstance(message, protocol.Prepare)
        self.connections.watch(uid, plan.watch, waits=not plan.status.world.round)
        for event in plan.events:
            log_event("event", **job.named(), type=event.type, reason=event.reason, message=event.message)
            self.events.post(job.view, event)
        if plan.trace is not None and self.trace is not None:
            self.trace(uid, plan.trace)

    def _give_up_silent(self, job: CachedJob, plan: Plan) -> None:
        """Mark the pod whose agent has been silent longest as dead, so that the next planning pass replaces the pod.

        `SilenceLimit` limits how many pods are marked.
        """
        job.given_up &= frozenset(plan.silent)
        waiting = [uid for uid in plan.silent if uid not in job.given_up]
        if not waiting:
            return
        seconds = self.silence.ask(job.view.namespace)
        if not seconds:
            job.given_up |= {waiting[0]}
            log_event("given up for silence", **job.named(), pod=waiting[0], others_waiting=len(waiting) - 1)
        self.changed_within(job.view.uid, seconds)

    async def _not_written(self, job: CachedJob, action: Action, error: Exception) -> None:
        """Process the error of a failed background write. The job's next planning pass decides what to do."""
        uid = job.view.uid
        retry_seconds = await self._again(job, error) if isinstance(error, PreconditionFailed | ApiError) else None
        if retry_seconds is None and self.cache.job(uid):
            log.error("a write of job %s failed: %s", job.name, action, exc_info=error)
            sentence = f"{type(action).__name__} failed: {type(error).__name__}: {error}"
            self.cache.create_refused(uid, Refusal.PERMANENT, sentence)
            retry_seconds = LONGEST_SECONDS
        if retry_seconds is not None:
            self.changed_within(uid, retry_seconds)

    async def _again(self, job: CachedJob, error: PreconditionFailed | ApiError) -> float | None:
        """Return the seconds until the job's next planning pass after an expected error.

        The result is None if the error is not expected, or if the job no longer exists.
        """
        if isinstance(error, PreconditionFailed | Conflict):
            job.preconditions_failed += 1
            log_event("outdated", **job.named(), why=str(error))
            return backoff.seconds(job.preconditions_failed, AGAIN_SECONDS, LONGEST_SECONDS)
        if isinstance(error, NotFound):
            try:
                return NOT_NOW_SECONDS if await self.check(job.view.uid) else None
            except ApiError:
                return NOT_NOW_SECONDS
        if isinstance(error, Unreachable):
            log_event("unreachable", **job.named(), message=error.message)
            return NOT_NOW_SECONDS
        if isinstance(error, Forbidden | Unauthorized):
            # Just after its start, the API server does not know the roles yet. If this lasts, the chart's roles are
            # missing.
            log_event("forbidden", **job.named(), message=error.message)
            return FORBIDDEN_SECONDS
        return None

    async def check(self, uid: str) -> bool:
        """Return whether the job exists in the API server. If not, remove the job from the cache."""
        job = self.cache.job(uid)
        if job is None:
            return False
        try:
            manifest = await self.client.get(TRAINING_JOBS, job.view.namespace, job.view.name)
            if manifest["metadata"]["uid"] == uid:
                self.cache.on_job(manifest)
                return True
        except NotFound:
            pass
        self.forget(uid)
        return False

    def forget(self, uid: str) -> None:
        """Remove a deleted job from the cache, and close the connections to its agents."""
        if job := self.cache.job(uid):
            log_event("forgotten", **job.named(), uid=uid)
        self.cache.forget_job(uid)
        self._drop(uid)

    def release(self, uid: str) -> None:
        """Stop serving a job whose namespace this operator no longer serves. The job's pods continue to run."""
        if job := self.cache.job(uid):
            log_event("released", **job.named(), uid=uid)
        self.cache.release_job(uid)
        self._drop(uid)

    def _drop(self, uid: str) -> None:
        self.connections.forget(uid)
        self._writes.forget(uid)
        self.of_another.discard(uid)
