"""Driver of the uploader process, which writes checkpoints to durable storage.

The driver sends the uploader one request at a time, and repeats the request until storage accepts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Optional, TypeVar

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.files.size import size_of
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.runtime.notifier import Notifier
from concertina_agent.workers.workers import Process, StartError
from concertina_protocol import worker_channel as w
from concertina_protocol.log import log_event
from concertina_protocol.worker_channel.agent_end import AgentEnd

BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between checks of storage that fails, and between starts of an uploader that dies again and again."""
MOST_PUBLICATIONS = 8
"""Number of failed publications in a row after which a newer checkpoint is published instead."""
T = TypeVar("T")


@dataclasses.dataclass
class Shipping:
    """Counters of uploads to durable storage since this agent started."""

    shards: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Seconds that all requests to upload or publish took, including failed ones."""
    failures: int = 0
    """Number of requests that failed."""


class UploadDriver:
    """Driver of the uploader process."""

    def __init__(self, snapshots: SnapshotFiles, emit: Callable[[e.Event], None]) -> None:
        self._snapshots, self._emit = snapshots, emit
        self._ships: dict[int, e.Ship] = {}
        """Newest requested upload of each shard that is not in storage yet, keyed by the shard's number."""
        self._publish: list[e.Publish] = []
        """Checkpoints to publish, the oldest first.

        A newer checkpoint does not replace an older one, because the older one may be the best checkpoint.
        """
        self._publish_failures = 0
        """Number of failures in a row of the oldest publication."""
        self._undo: list[p.Undone] = []
        self._news = Notifier()
        self._failures, self._probe_at = 0, 0.0
        """Number of checks that have failed in a row, and time of the next check in monotonic seconds."""
        self._healthy = self._probe_requested = False
        self._living: Optional[tuple[str, ...]] = None
        """Other existing jobs, as in `Assign.living`, or None before the first Assign."""
        self._owned = False
        """True if this job is known to own the folder of checkpoints. From then on, the owner is not checked again."""
        self._failing = False
        """True if a request has failed and no later request has succeeded."""
        self._part_goes_first = False
        """True if an upload must be sent before the next publication.

        The field is set when a publication has failed, so that a publication that always fails does not prevent
        uploads.
        """
        self.shipping = Shipping()

    # --- requests for the uploader ----------------------------------------------------------------------------------

    def begin(self, effect: e.StartRound) -> None:
        """Queue the request that registers this job as the owner of its checkpoint folder, at the start of a round.

        The request precedes all requests that write a state to the folder.
        """
        self._living = effect.assign.living
        if not self._owned:
            self.probe(e.ProbeStorage())

    def ship(self, effect: e.Ship) -> None:
        if effect.is_slot:
            link = self._snapshots.link_for_shipping(Path(effect.path), effect.id.step)
            effect = dataclasses.replace(effect, path=str(link), is_slot=False)
        if effect.shard in self._ships:
            self._snapshots.free(Path(self._ships[effect.shard].path))
        self._ships[effect.shard] = effect
        self._news.notify()

    def publish(self, effect: e.Publish) -> None:
        self._publish.append(effect)
        self._news.notify()

    def undo(self, effect: e.Undo) -> None:
        """Queue a request that applies a rollback to storage.

        If the file LATEST in storage names a checkpoint that the rollback has undone, LATEST is changed. The request is
        sent before any checkpoint is published. It stays in the queue when the round ends.
        """
        if effect.undone not in self._undo:
            self._undo.append(effect.undone)
        self._news.notify()

    def probe(self, effect: e.ProbeStorage) -> None:
        """Check whether storage is reachable, and which checkpoint the file LATEST in storage names.

        No other request is sent before this one.
        """
        self._healthy, self._probe_requested, self._probe_at = False, True, 0.0
        self._news.notify()

    def abandon(self, effect: e.KillWorkers) -> None:
        """Remove all requests of the round from the queue, because the round is over.

        An upload that is in progress fails, because the agent truncates the shard file.
        """
        for ship in self._ships.values():
            self._snapshots.free(Path(ship.path))
        self._ships.clear()
        self._publish.clear()
        self._failing = False

    # --- the process ------------------------------------------------------------------------------------------------

    async def keep_running(self, start: Callable[[], Awaitable[Process]], ready: Callable[[], Awaitable[str]]) -> None:
        """Start the uploader process as soon as processes can be started, and restart it when it dies."""
        if await ready():
            return  # processes can never be started
        deaths = 0
        while True:
            try:
                log_event("uploader_ended", code=await (await start()).ended)
            except StartError as error:
                log_event("uploader_not_started", error=str(error))
            self._healthy = False
            await asyncio.sleep(BACKOFF[min(deaths, len(BACKOFF) - 1)])
            deaths += 1

    async def serve(self, end: AgentEnd) -> None:
        """Send requests to the uploader process until its connection ends."""
        with contextlib.suppress(ConnectionError):
            while True:
                count = self._news.count
                if not self._healthy:
                    await self._news.wait(count, self._probe_at - time.monotonic())
                    if time.monotonic() >= self._probe_at:
                        await self._probe(end)
                elif self._undo:
                    await self._undo_one(end, self._undo[0])
                elif self._publish and not (self._part_goes_first and self._ships):
                    await self._publish_one(end, self._publish[0])
                elif self._ships:
                    await self._ship_one(end, min(self._ships.values(), key=lambda ship: ship.id.step))
                else:
                    await self._news.wait(count, 60.0)

    async def _probe(self, end: AgentEnd) -> None:
        self._probe_requested = False
        answer = await _ask(end, w.Probe(self._owned, self._living), w.StorageState)
        self._owned, storage = answer.owned, answer.storage
        self._emit(e.StorageSeen(storage))
        self._healthy = storage.state == p.StorageHealth.READY and not self._probe_requested
        if storage.state != p.StorageHealth.READY:
            self._schedule_probe(storage.message)
        elif not self._failing:
            self._failures = 0

    async def _undo_one(self, end: AgentEnd, undone: p.Undone) -> None:
        storage = (await _ask(end, w.Undo(undone), w.StorageState)).storage
        if storage.state == p.StorageHealth.ERROR:
            return self._fail(storage.message)
        self._done()
        self._undo.remove(undone)
        self._emit(e.StorageSeen(storage))
        return None

    async def _ship_one(self, end: AgentEnd, effect: e.Ship) -> None:
        self._part_goes_first = False
        begun, size = time.monotonic(), size_of(effect.path)
        answer = await _ask(end, w.Ship(effect.id, effect.shard, effect.path), w.Shipped)
        self.shipping.seconds += time.monotonic() - begun
        is_current = self._ships.get(effect.shard) is effect
        if answer.error:  # the error of a request that was dropped says nothing about storage
            return self._fail(answer.error) if is_current else None
        self._done()
        self.shipping.shards, self.shipping.bytes = self.shipping.shards + 1, self.shipping.bytes + size
        if is_current:
            del self._ships[effect.shard]
        # The shard is in storage even if its worker has continued, which may happen before this answer is read.
        self._emit(e.PartShipped(p.Part(effect.id, effect.shard)))
        return None

    async def _publish_one(self, end: AgentEnd, effect: e.Publish) -> None:
        answer = await _ask(end, w.Publish(effect.id, effect.complete), w.Published)
        not_swept = answer.error if answer.durable is not None else ""
        if answer.error and not not_swept and not answer.refused:
            self._part_goes_first = True
            self._publish_failures += 1
            if self._publish_failures >= MOST_PUBLICATIONS and len(self._publish) > 1:
                log_event("not_published", step=effect.id.step, error=answer.error)
                self._forget(effect)
            return self._fail(answer.error)
        self._done()
        if not_swept:
            log_event("not_swept", step=effect.id.step, error=not_swept)
        self._forget(effect)
        self._emit(e.PublishDone(effect.id, answer.durable, "" if not_swept else answer.error))
        return None

    def _forget(self, effect: e.Publish) -> None:
        self._publish_failures = 0
        if effect in self._publish:  # the round may have ended meanwhile
            self._publish.remove(effect)

    def _done(self) -> None:
        self._failures, self._failing, self._part_goes_first = 0, False, False

    def _fail(self, message: str) -> None:
        """Record that a request to storage has failed.

        No more requests are sent until a check has shown that storage works again.
        """
        self._healthy, self._failing = False, True
        self._emit(e.StorageSeen(p.Storage(p.StorageHealth.ERROR, None, message)))
        self._schedule_probe(message)

    def _schedule_probe(self, message: str) -> None:
        self.shipping.failures += 1
        wait = BACKOFF[min(self._failures, len(BACKOFF) - 1)]
        log_event("storage_trouble", error=message, again_in=wait)
        self._failures, self._probe_at = self._failures + 1, time.monotonic() + wait


async def _ask(end: AgentEnd, message: w.Message, kind: type[T]) -> T:
    """Send a request to the uploader, and return the answer.

    Raises:
        ConnectionError: If the uploader has exited.
    """
    end.send(message)
    answer = await end.receive()
    if not isinstance(answer, kind):
        raise ConnectionError(f"the uploader answered with {answer!r}")
    return answer
