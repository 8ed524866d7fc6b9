"""Driver of the tracking process, which runs while there are records to send to a tracking tool."""

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
"""Seconds between starts of a tracking process that dies again and again."""
SHIP_ALL_SECONDS = 20.0
"""Seconds that an exiting agent waits until all records are sent, unless its grace period is shorter."""
LOOK_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""Seconds of silence, while there are records to send, after which the process is assumed to wait for its tool."""


class TrackingDriver:
    """Driver of the tracking process."""

    def __init__(
        self, folder: Path, tracking: TrackingRecorder, start: Callable[[], Process], emit: Callable[[e.Event], None]
    ) -> None:
        """Prepare to record the run. The tracking process is not started yet.

        Args:
            folder: Folder of the spool.
            tracking: Recorder of the run.
            start: Function that starts the process. It may raise StartError.
            emit: Function that passes events to the state machine.
        """
        self._spool, self._tracking, self._start, self._emit = SpoolWriter(folder), tracking, start, emit
        self._shipped = min(SpoolReader(folder).next, self._spool.next)
        """Number of the first record that, as far as the agent knows, the tracking tool does not have."""
        self._dropped, self._error, self._reported_error = 0, "", ""
        self._heard_at = time.monotonic()
        """Time from which the silence of the process is counted.

        The value is the time of the process's last message. If all records had been sent by then, the value is the time
        of the next record.
        """
        self._end: Optional[AgentEnd] = None
        self._news = Notifier()

    @property
    def behind(self) -> int:
        """Number of records that have not been sent to the tracking tool."""
        return self._spool.next - self._shipped

    def record(self, agent: AgentState, event: e.Event, effects: Iterable[e.Effect], at: float) -> None:
        """Write the records that follow from an event into the spool, the folder that the tracking process reads."""
        for record in self._tracking.records(agent, event, effects, at):
            if isinstance(record, RoundBegan) and not record.coordinates and self._spool.next == self._shipped:
                continue  # such a record is only sent if others are to be sent too
            if not self.behind:
                self._heard_at = time.monotonic()
            self._spool.append(record)
            self._news.notify()

    async def keep_running(self) -> None:
        """Start the tracking process whenever there are records to send, and restart the process if it dies."""
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
                return  # a retry cannot help, and the process has reported the reason
            deaths = 0 if code == 0 else deaths + 1
            if code:
                log_event("tracking_ended", code=code)
                self._error = self._error or (
                    f"The process that sends records to the tracker ended with exit code {code}."
                )
            await asyncio.sleep(BACKOFF[min(deaths, len(BACKOFF) - 1)])

    async def watch(self) -> None:
        """Emit an event when the tracking tool stops accepting records, and when it accepts records again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._report_trouble()

    async def serve(self, end: AgentEnd) -> None:
        """Receive messages of the tracking process until it closes its connection."""
        self._end = end
        try:
            while (message := await end.receive()) is not None:
                if isinstance(message, w.TrackingState):
                    self._shipped = max(self._shipped, message.shipped)
                    self._dropped, self._error = message.dropped, message.error
                    self._heard_at = time.monotonic()
                    self._news.notify()
                    if self._error:
                        self._report_trouble()
        finally:
            self._end = None

    async def ship_all(self, seconds: float) -> None:
        """Wait until all records are sent, but at most `seconds` seconds.

        The agent calls this method before it exits.
        """
        until = time.monotonic() + min(seconds, SHIP_ALL_SECONDS)
        while self.behind and (remaining_seconds := until - time.monotonic()) > 0:
            count = self._news.count
            if self._end is not None:
                self._end.send(w.ShipAll())
            await self._news.wait(count, min(remaining_seconds, 1.0))
        while self._end is not None and time.monotonic() < until:  # wait until the process has closed the run
            self._end.send(w.ShipAll())
            await asyncio.sleep(0.1)
        log_event("tracking_at_the_end", behind=self.behind)

    def _report_trouble(self) -> None:
        trouble = self._spool.failed or self._error
        if not trouble and self.behind and time.monotonic() - self._heard_at > SILENCE_SECONDS:
            trouble = f"The tracker has not answered for {SILENCE_SECONDS:g} s."
        if trouble and self._dropped:
            trouble = f"{trouble} {self._dropped} records were discarded because the spool is full."
        if trouble != self._reported_error:
            self._reported_error = trouble
            log_event("tracking", behind=self.behind, error=trouble)
            self._emit(e.TrackingSeen(trouble))
