"""The watch stream of one agent, opened again and again while it is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import concertina_protocol as protocol
from concertina import backoff, metrics
from concertina.agents.calls import (
    CallError,
    ClosedError,
    ConnectionIdentity,
    Waits,
    calls_on,
    connection,
    parsed,
    receive_line,
)
from concertina.plan.observed import ConnectionRefusal

log = logging.getLogger(__name__)
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
"""Until a stream is opened again."""
AT_LAST_SECONDS = 0.25
"""For what has arrived to be read, before an agent is called silent: this event loop may have been late."""
OnReport = Callable[[protocol.Report], None]


class StreamEnd(enum.StrEnum):
    """How a stream ended, or an attempt to open it."""

    CLOSED = "closed"
    """The host closed it."""
    SILENT = "silent"
    NOT_LISTENING = "not_listening"
    """The host is there, and no agent listens."""
    UNREACHABLE = "unreachable"
    OTHER_KEY = "other_key"
    """An agent of another master key answers."""
    OTHER_REPLICA = "other_replica"
    """Another replica answers at the address."""
    REFUSED = "refused"
    """By the agent, in words."""
    NOT_UNDERSTOOD = "not_understood"
    FAILED = "failed"
    """By an error of this operator's that nobody foresaw."""
    NOT_WANTED = "not_wanted"
    """This operator closed it: the plan asks for it no more."""


REFUSALS = {
    StreamEnd.NOT_LISTENING: ConnectionRefusal.NOT_LISTENING,
    StreamEnd.OTHER_KEY: ConnectionRefusal.OTHER_KEY,
}
metrics.begin_at_zero(metrics.AGENT_STREAM_ENDS, StreamEnd)


@dataclass(frozen=True)
class Lost:
    sentence: str
    end: StreamEnd

    @property
    def refusal(self) -> ConnectionRefusal | None:
        """How the host turned it away, where it is there."""
        return REFUSALS.get(self.end)


OnLost = Callable[[Lost], None]


async def follow(
    identity: ConnectionIdentity,
    address: str,
    ask: Callable[[], protocol.Watch],
    on_waits: Waits,
    on_report: OnReport,
    on_lost: OnLost,
) -> None:
    """Calls `on_waits` each time that a stream is opened, `on_report` with each report that says anything new, and
    `on_lost` whenever it can't be opened, breaks or is silent for too long (`silence`). Runs until it is cancelled."""
    failures = 0

    def fresh(report: protocol.Report) -> None:
        nonlocal failures
        failures = 0
        on_report(report)

    while True:
        lost = await _stream(identity, address, ask(), on_waits, fresh)
        metrics.AGENT_STREAM_ENDS.labels(lost.end).inc()
        try:
            on_lost(lost)
        except Exception:  # of whoever hears it: the stream is opened again all the same
            log.exception("%s: that could not be told", lost.sentence)
        await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
        failures += 1


async def _stream(
    identity: ConnectionIdentity, address: str, watch: protocol.Watch, on_waits: Waits, on_report: OnReport
) -> Lost:
    """One stream from its start to its end."""
    last: protocol.Report | None = None
    before = 0
    """The hash of the line before: a line itself may be large, and is not kept."""
    try:
        async with (
            connection(identity, address, watch, on_waits) as opened,
            calls_on(opened, identity, address) as calls,
            _Silence() as quiet,
        ):
            while True:
                line = await receive_line(opened, address)
                with quiet.broken():
                    async with identity.allowance.line():
                        is_same, before = hash(line) == before, hash(line)
                        message = None if is_same and not calls.wait else parsed(line, address, identity.line_limits())
                        del line
                        if message is None:  # nothing is new, as nearly always
                            continue
                        if calls.answered(message):
                            continue
                        if isinstance(message, protocol.Refused):
                            return Lost(f"{address} refused to be watched: {message.reason}", StreamEnd.REFUSED)
                        if isinstance(message, protocol.ReportChange):
                            if last is None:
                                why = f"{address} told of a change before there was a report"
                                return Lost(why, StreamEnd.NOT_UNDERSTOOD)
                            message = protocol.changed(last, message)
                        if isinstance(message, protocol.Report):
                            last = message
                            if message.takes_calls:
                                identity.streams[address] = calls
                            quiet.may_last(silence(watch, message))
                            on_report(message)
    except TimeoutError:
        return Lost(f"{address} was silent for {silence(watch, last):g} s", StreamEnd.SILENT)
    except ConnectionRefusedError:
        return Lost(f"nobody listens at {address}", StreamEnd.NOT_LISTENING)
    except ssl.SSLCertVerificationError as error:
        # Where the agents' certificate is of our CA, so is the CA that they check ours by: both are in one Secret.
        return Lost(f"{address} has another master key: {error}", StreamEnd.OTHER_KEY)
    except (OSError, ssl.SSLError) as error:
        end = StreamEnd.CLOSED if isinstance(error, ConnectionResetError) else StreamEnd.UNREACHABLE
        return Lost(f"{address} can't be reached: {error}", end)
    except protocol.ProtocolError as error:
        return Lost(f"{address} sent what is not understood: {error}", StreamEnd.NOT_UNDERSTOOD)
    except CallError as error:
        return Lost(str(error), StreamEnd.CLOSED if isinstance(error, ClosedError) else StreamEnd.NOT_UNDERSTOOD)
    except Exception as error:
        # Whatever an agent sends: a stream that ended unseen would count as open for ever.
        log.exception("the watch of %s failed", address)
        return Lost(f"the watch of {address} failed: {type(error).__name__}: {error}", StreamEnd.FAILED)


def silence(watch: protocol.Watch, report: protocol.Report | None) -> float:
    """Seconds after which a stream is lost that says nothing more."""
    beat = watch.idle_beat if is_idle(report) else protocol.REPORT_SECONDS
    return protocol.SILENCE_SECONDS / protocol.REPORT_SECONDS * beat


def is_idle(report: protocol.Report | None) -> bool:
    """Whether it is known to be in no round."""
    return report is not None and report.state is protocol.State.IDLE


class _Silence:
    """Raises TimeoutError inside once nothing has broken the silence for as long as it may last. A timer that looks
    when it is due costs less than one that each of a thousand lines a second moves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._broken_at = self._loop.time()
        self._handles_line = False
        self._longest = protocol.SILENCE_SECONDS
        self._doubted_at: float | None = None

    async def __aenter__(self) -> _Silence:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._longest, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """Count the silence as broken for as long as a line is handled: a wait within this operator is no silence of
        the agent's."""
        self._handles_line = True
        try:
            yield
        finally:
            self._handles_line = False
            self._broken_at = self._loop.time()

    def may_last(self, seconds: float) -> None:
        if seconds < self._longest:
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._look)
        self._longest = seconds

    def _look(self) -> None:
        if self._handles_line:
            self._broken_at = self._loop.time()
        left = self._broken_at + self._longest - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._doubted_at != self._broken_at:
            self._doubted_at = self._broken_at
            self._timer = self._loop.call_later(AT_LAST_SECONDS, self._look)
        else:
            self._timeout.reschedule(self._loop.time())
