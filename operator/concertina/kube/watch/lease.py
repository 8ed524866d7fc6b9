"""Leader election with a coordination Lease, so that only one operator acts at a time.

Each process measures time only with its own monotonic clock. concertina has its own implementation, because the leader
elector of kubernetes.aio is broken and kopf has no leader election (decision "A custom Lease").

If two operators both act as the leader, they waste work but do no harm: a status write fails if another operator has
begun a round since the job was observed. The leader can therefore keep its role while the API server is down. During
this time, no other operator can take the Lease or write anything.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import random
import time
from collections.abc import Callable

from concertina.kube.client import Client
from concertina.kube.errors import ApiError, Conflict, NotFound
from concertina.kube.resources import LEASES, Raw

log = logging.getLogger(__name__)
DURATION_SECONDS = 10
RENEW_SECONDS = 2.0


class LeaseLost(Exception):
    """Error: another operator has taken the Lease."""


class Lease:
    """Leader election Lease, from the point of view of one process.

    Each running process needs a different `identity`.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        duration: int = DURATION_SECONDS,
        renew_every: float = RENEW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration
        self._renew_every = renew_every
        self._clock = clock
        self._observed: tuple[str, float] = ("", 0.0)
        """resourceVersion of the Lease at the last read, and the time at which this version was first read."""
        self._held_until = 0.0
        self._answered = -math.inf
        """Time of the last response from the API server that contained the Lease."""
        self._holder = ""
        """Name of the other process that held the Lease at the last read."""

    @property
    def held(self) -> bool:
        """True if this process has renewed the Lease so recently that no other process can have taken it."""
        return self._clock() < self._held_until

    @property
    def holder(self) -> str:
        """Name of the process that held the Lease at the last read; empty if unknown."""
        return self._identity if self.held else self._holder

    @property
    def answered_lately(self) -> bool:
        """Return whether the API server has returned the Lease within the last `duration` seconds."""
        return self._clock() < self._answered + self._duration

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        logged_holder = ""
        while True:
            try:
                if await self._try():
                    log.info("the lease %s/%s is held by %s", self._namespace, self._name, self._identity)
                    return
                if self._holder != logged_holder:
                    logged_holder = self._holder
                    log.info("waiting for the lease %s/%s, which %s holds", self._namespace, self._name, logged_holder)
            except ApiError as error:
                log.info("the lease can't be acquired yet: %s", error)
            await asyncio.sleep(self._renew_every / 2 * random.uniform(0.8, 1.2))

    async def keep(self) -> None:
        """Renew the Lease periodically while this process holds it.

        Raises:
            LeaseLost: When another process holds the Lease.
        """
        while True:
            await asyncio.sleep(self._renew_every * random.uniform(0.9, 1.1))
            try:
                async with asyncio.timeout(self._duration / 2):
                    renewed = await self._try()
            except (ApiError, TimeoutError) as error:
                log.warning("the lease could not be renewed: %s", error or "no answer")
                continue
            if not renewed:
                raise LeaseLost(f"another operator has taken the lease {self._namespace}/{self._name}")

    async def release(self) -> None:
        """Release the Lease, so that another operator can become the leader at once. Errors are only logged."""
        try:
            lease = await self._client.get(LEASES, self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._client.replace(LEASES, self._namespace, self._name, lease)
        except ApiError as error:
            log.info("the lease was not released: %s", error)
        self._held_until = 0.0

    async def _try(self) -> bool:
        """Acquire or renew the Lease, and return True. If another process holds the Lease, return False."""
        for _ in range(3):
            begun = self._clock()
            try:
                lease = await self._client.get(LEASES, self._namespace, self._name)
            except NotFound:
                lease = None
            self._answered = begun
            if lease is not None and self._taken(lease, begun):
                return False
            try:
                stored = await self._write(lease)
            except Conflict:
                continue  # another process wrote, or the response to our own write was lost: read again
            self._observed = (stored["metadata"]["resourceVersion"], begun)
            self._held_until = begun + self._duration
            return True
        return False

    async def _write(self, lease: Raw | None) -> Raw:
        if lease is None:
            return await self._client.create(LEASES, self._namespace, self._renewed(None))
        return await self._client.replace(LEASES, self._namespace, self._name, self._renewed(lease))

    def _taken(self, lease: Raw, now: float) -> bool:
        holder = lease["spec"].get("holderIdentity") or ""
        if holder in ("", self._identity):
            return False
        self._holder = holder
        version = lease["metadata"]["resourceVersion"]
        if version != self._observed[0]:
            self._observed = (version, now)
        return now < self._observed[1] + (lease["spec"].get("leaseDurationSeconds") or self._duration)

    def _renewed(self, lease: Raw | None) -> Raw:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old = lease["spec"] if lease else {}
        is_new_holder = old.get("holderIdentity") != self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration,
            "renewTime": now,
            "acquireTime": now if is_new_holder else old.get("acquireTime", now),
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (1 if lease and is_new_holder else 0),
        }
        metadata = lease["metadata"] if lease else {"name": self._name, "namespace": self._namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
