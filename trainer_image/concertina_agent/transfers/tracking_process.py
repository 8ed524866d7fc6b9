"""Keeping a tracking process while there is something to ship, and knowing how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Optional

from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.tracking import TrackingRecorder
from concertina_agent.runtime.notifier import Notifier
from concertina_agent.workers.workers import Process, StartError
from concertina_protocol import worker_channel as w
from concertina_protocol.log import log_event
from concertina_protocol.tracking.spool import SpoolReader, SpoolWriter
from concertina_protocol.tracking.tracking_records import RoundBegan
from concertina_protocol.worker_channel import BAD_INPUT_EXIT
from concertina_protocol.worker_channel.agent_end import AgentEnd

BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between starts of a process that dies."""
SHIP_ALL_SECONDS = 20.0
"""That an agent stays at its end for what is not shipped, where its grace is no shorter."""
LOOK_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""After which a process that has something to ship, and says nothing, is in trouble: it waits for its tracker."""


class TrackingDriver:
    def __init__(
        self, folder: Path, tracking: TrackingRecorder, start: Callable[[], Process], emit: Callable[[e.Event], None]
    ) -> None:
        """`folder`: of the spool. `start` raises StartError."""
        self._spool, self._tracking, self._start, self._emit = SpoolWriter(folder), tracking, start, emit
        self._shipped = min(SpoolReader(folder).next, self._spool.next)
        """Number of the first record that is not with the tracker, as far as is known."""
        self._dropped, self._error, self._told = 0, "", ""
        self._heard_at = time.monotonic()
        """When the process last said something, or began to have something to ship."""
        self._end: Optional[AgentEnd] = None
        self._news = Notifier()

    @property
    def behind(self) -> int:
        """Records that are not shipped."""
        return self._spool.next - self._shipped

    def record(self, agent: AgentState, event: e.Event, effects: Iterable[e.Effect], at: float) -> None:
        """What there is to tell after an event; see Tracking."""
        for record in self._tracking.records(agent, event, effects, at):
            if isinstance(record, RoundBegan) and not record.coordinates and self._spool.next == self._shipped:
                continue  # it only matters to what is not shipped
            if not self.behind:
                self._heard_at = time.monotonic()
            self._spool.append(record)
            self._news.notify()

    async def keep_running(self) -> None:
        """The process, as long as there is something to ship."""
        deaths = 0
        while True:
            count = self._news.count
            if not self.behind:
                await self._news.wait(count, 60.0)
                continue
            try:
                code = await self._start().ended
            except StartError as error:
                self._error, code = str(error), 1
            if code == BAD_INPUT_EXIT:
                return  # trying again can't help, as it has said
            deaths = 0 if code == 0 else deaths + 1
            if code:
                log_event("tracking_ended", code=code)
                self._error = self._error or f"The process that ships to the tracker ended with {code}."
            await asyncio.sleep(BACKOFF[min(deaths, len(BACKOFF) - 1)])

    async def watch(self) -> None:
        """Says when it is in trouble, and when not any more."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._tell()

    async def serve(self, end: AgentEnd) -> None:
        """Hear the process, as long as its connection lasts."""
        self._end = end
        try:
            while (message := await end.receive()) is not None:
                if isinstance(message, w.TrackingState):
                    self._shipped = max(self._shipped, message.shipped)
                    self._dropped, self._error = message.dropped, message.error
                    self._heard_at = time.monotonic()
                    self._news.notify()
                    if self._error:
                        self._tell()
        finally:
            self._end = None

    async def ship_all(self, seconds: float) -> None:
        """At the agent's end: wait until all is shipped, at most so long."""
        until = time.monotonic() + min(seconds, SHIP_ALL_SECONDS)
        while self.behind and (left := until - time.monotonic()) > 0:
            count = self._news.count
            if self._end is not None:
                self._end.send(w.ShipAll())
            await self._news.wait(count, min(left, 1.0))
        while self._end is not None and time.monotonic() < until:  # it closes the run
            self._end.send(w.ShipAll())
            await asyncio.sleep(0.1)
        log_event("tracking_at_the_end", behind=self.behind)

    def _tell(self) -> None:
        trouble = self._spool.failed or self._error
        if not trouble and self.behind and time.monotonic() - self._heard_at > SILENCE_SECONDS:
            trouble = f"The tracker has not answered for {SILENCE_SECONDS:g} s."
        if trouble and self._dropped:
            trouble = f"{trouble} {self._dropped} records were given up, the spool being full."
        if trouble != self._told:
            self._told = trouble
            log_event("tracking", behind=self.behind, error=trouble)
            self._emit(e.TrackingSeen(trouble))
