"""Writer of Kubernetes events about TrainingJobs.

Repeated events are counted, and the events of a job are rate-limited.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from concertina.api import API_VERSION, KIND
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, NotFound
from concertina.kube.resources import EVENTS, Raw
from concertina.plan.actions import Event
from concertina.plan.observed import JobView
from concertina_protocol.traces import trace_id

log = logging.getLogger(__name__)
REPEATED_SECONDS = 600.0
"""Seconds after an event within which a repetition only increments the event's count."""
BURST, REFILL_SECONDS = 25, 20.0
"""Rate limit for the new events of a job: the burst, and the seconds until one more event is allowed."""
TRACE = "concertina.dev/trace-id"
_REMEMBERED = 4096
_MESSAGE_LIMIT = 1024


@dataclass
class _Written:
    name: str
    count: int
    at: float


@dataclass
class _Bucket:
    tokens: float
    at: float


class Events:
    """Queue of events, which writes them one after the other in the background.

    Planning passes don't wait for the writes.
    """

    def __init__(self, client: Client, component: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._component = component
        self._clock = clock
        self._queue: asyncio.Queue[tuple[JobView, Event]] = asyncio.Queue(maxsize=1000)
        self._written: OrderedDict[tuple[str, str, str, str], _Written] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def post(self, job: JobView, event: Event) -> None:
        """Add an event to the queue. If the queue is full, drop the event."""
        try:
            self._queue.put_nowait((job, event))
        except asyncio.QueueFull:
            log.warning("event %s of %s/%s dropped: too many at once", event.reason, job.namespace, job.name)

    async def run(self) -> None:
        """Write the queued events forever."""
        while True:
            job, event = await self._queue.get()
            try:
                await self._write(job, event)
            except ApiError as error:
                log.info("event %s of %s/%s not written: %s", event.reason, job.namespace, job.name, error)

    async def _write(self, job: JobView, event: Event) -> None:
        key, now = (job.uid, event.type, event.reason, event.message), self._clock()
        before = self._written.get(key)
        if before is not None and now - before.at < REPEATED_SECONDS:
            repetition = {"count": before.count + 1, "lastTimestamp": _timestamp(), "metadata": _of_round(job)}
            try:
                await self._client.patch(EVENTS, job.namespace, before.name, repetition)
                before.count += 1
                return
            except NotFound:
                pass  # Kubernetes deletes events after an hour
        if not self._allowed(job.uid, now):
            return
        body = _manifest(job, event, self._component)
        await self._client.create(EVENTS, job.namespace, body)
        self._written[key] = _Written(body["metadata"]["name"], 1, now)
        self._written.move_to_end(key)
        if len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)

    def _allowed(self, uid: str, now: float) -> bool:
        bucket = self._buckets.setdefault(uid, _Bucket(BURST, now))
        bucket.tokens = min(BURST, bucket.tokens + (now - bucket.at) / REFILL_SECONDS)
        bucket.at = now
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True


def _manifest(job: JobView, event: Event, component: str) -> Raw:
    now = _timestamp()
    message = event.message
    if len(message) > _MESSAGE_LIMIT:
        message = message[: _MESSAGE_LIMIT - 3] + "..."
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{job.name[:200]}.{secrets.token_hex(8)}",
            "namespace": job.namespace,
            **_of_round(job),
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": message,
        "source": {"component": "concertina"},
        "reportingComponent": "concertina.dev/operator",
        "reportingInstance": component,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _of_round(job: JobView) -> Raw:
    """Return metadata with an annotation that contains the trace id of the current round; empty without a round."""
    round = job.status.world.latest_round
    return {"annotations": {TRACE: trace_id(job.uid, round)}} if round else {}


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
