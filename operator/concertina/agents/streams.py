"""Report stream of one agent. If the stream breaks, the operator opens a new one while it needs the reports."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
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
"""Shortest and longest delay in seconds before a stream is opened again."""
AT_LAST_SECONDS = 0.25
"""Seconds for which the operator still reads lines that have already arrived, before an agent counts as silent.

The event loop of the operator may have been late to read them.
"""
OnReport = Callable[[protocol.Report], None]


class StreamEnd(enum.StrEnum):
    """Reasons why a stream ended or could not be opened."""

    CLOSED = "closed"
    """The agent's host closed the stream."""
    SILENT = "silent"
    NOT_LISTENING = "not_listening"
    """The host is reachable, but no agent listens on the port."""
    UNREACHABLE = "unreachable"
    OTHER_KEY = "other_key"
    """The agent's certificate derives from a different master key."""
    OTHER_REPLICA = "other_replica"
    """Another replica answered at the address."""
    REFUSED = "refused"
    """The agent refused the stream with a reason."""
    NOT_UNDERSTOOD = "not_understood"
    FAILED = "failed"
    """There was an unexpected error in this operator."""
    NOT_WANTED = "not_wanted"
    """This operator closed the stream because it no longer needs it."""


REFUSALS = {
    StreamEnd.NOT_LISTENING: ConnectionRefusal.NOT_LISTENING,
    StreamEnd.OTHER_KEY: ConnectionRefusal.OTHER_KEY,
}
metrics.begin_at_zero(metrics.AGENT_STREAM_ENDS, StreamEnd)


@dataclass(frozen=True)
class Lost:
    """End of a report stream: its kind, and the reason as a sentence for the log."""

    sentence: str
    end: StreamEnd

    @property
    def refusal(self) -> ConnectionRefusal | None:
        """Reason for which the agent's host refused the report stream; None if the stream ended for another reason."""
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
    """Keep a report stream to an agent open until this coroutine is cancelled.

    Args:
        identity: Parameters of the connections to the job's agents.
        address: Address of the agent.
        ask: Function that returns the Watch message with which each stream begins.
        on_waits: Callback for waits within the operator, as described at `calls.Waits`.
        on_report: Callback for each report that differs from the previous report.
        on_lost: Callback for a stream that can't be opened, breaks, or sends nothing for longer than the function
            `silence` allows.
    """
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
        except Exception:  # the callback raised; the stream is reopened all the same
            log.exception("%s: this could not be reported", lost.sentence)
        await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
        failures += 1


async def _stream(
    identity: ConnectionIdentity, address: str, watch: protocol.Watch, on_waits: Waits, on_report: OnReport
) -> Lost:
    """Open a report stream, read it until it ends, and return why it ended."""
    last: protocol.Report | None = None
    before = 0
    """Hash of the previous line. The line itself is not stored, because it may be long."""
    try:
        async with (
            connection(identity, address, watch, on_waits) as opened,
            calls_on(opened, identity, address) as calls,
            _Silence() as quiet,
        ):

            def handle(line: bytes) -> Lost | None:
                """Process one line. Return the reason if the stream must end after this line, otherwise None."""
                nonlocal last, before
                is_same, before = hash(line) == before, hash(line)
                if is_same and not calls.wait:  # nothing has changed, which is the usual case
                    return None
                message = parsed(line, address, identity.line_limits())
                if calls.answered(message):
                    return None
                if isinstance(message, protocol.Refused):
                    return Lost(f"{address} refused the watch: {message.reason}", StreamEnd.REFUSED)
                if isinstance(message, protocol.ReportChange):
                    if last is None:
                        why = f"{address} sent a change before its first report"
                        return Lost(why, StreamEnd.NOT_UNDERSTOOD)
                    message = protocol.changed(last, message)
                if isinstance(message, protocol.Report):
                    last = message
                    if message.takes_calls:
                        identity.streams[address] = calls
                    quiet.may_last(silence(watch, message))
                    on_report(message)
                return None

            lost: Lost | None = None
            while lost is None:
                line = await receive_line(opened, address)
                with quiet.broken():
                    lost = await identity.allowance.handle(functools.partial(handle, line))
                    await calls.taken()
                del line
            return lost
    except TimeoutError:
        return Lost(f"{address} was silent for {silence(watch, last):g} s", StreamEnd.SILENT)
    except ConnectionRefusedError:
        return Lost(f"nobody listens at {address}", StreamEnd.NOT_LISTENING)
    except ssl.SSLCertVerificationError as error:
        # The agents' certificate and the CA for the operator's certificate are in the same Secret, so both come from
        # one CA.
        return Lost(f"{address} has another master key: {error}", StreamEnd.OTHER_KEY)
    except (OSError, ssl.SSLError) as error:
        end = StreamEnd.CLOSED if isinstance(error, ConnectionResetError) else StreamEnd.UNREACHABLE
        return Lost(f"{address} can't be reached: {error}", end)
    except protocol.ProtocolError as error:
        return Lost(f"{address} sent an invalid message: {error}", StreamEnd.NOT_UNDERSTOOD)
    except CallError as error:
        return Lost(str(error), StreamEnd.CLOSED if isinstance(error, ClosedError) else StreamEnd.NOT_UNDERSTOOD)
    except Exception as error:
        # Catch all errors that an agent may cause. If the stream ended without a result, it would count as open
        # forever.
        log.exception("the watch of %s failed", address)
        return Lost(f"the watch of {address} failed: {type(error).__name__}: {error}", StreamEnd.FAILED)


def silence(watch: protocol.Watch, report: protocol.Report | None) -> float:
    """Return the seconds without a line after which a report stream counts as lost.

    The limit can be longer for an idle agent, which may report less often.
    """
    beat = watch.idle_beat if is_idle(report) else protocol.REPORT_SECONDS
    return protocol.SILENCE_SECONDS / protocol.REPORT_SECONDS * beat


def is_idle(report: protocol.Report | None) -> bool:
    """Return whether the agent has reported that it is not in a round."""
    return report is not None and report.state is protocol.State.IDLE


class _Silence:
    """Async context manager that raises TimeoutError in its block if a stream sends nothing for too long.

    It uses one timer, which checks the time of the last line when it fires. This costs less than a new timer for each
    line, because a thousand lines can arrive per second.
    """

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
        """Return a context manager for the processing of one line, during which the stream does not count as silent.

        A line may have to wait in the operator, and the agent is not silent during this wait.
        """
        self._handles_line = True
        try:
            yield
        finally:
            self._handles_line = False
            self._broken_at = self._loop.time()

    def may_last(self, seconds: float) -> None:
        """Set the number of seconds for which the report stream may be silent."""
        if seconds < self._longest:
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._look)
        self._longest = seconds

    def _look(self) -> None:
        if self._handles_line:
            self._broken_at = self._loop.time()
        remaining_seconds = self._broken_at + self._longest - self._loop.time()
        if remaining_seconds > 0:
            self._timer = self._loop.call_later(remaining_seconds, self._look)
        elif self._doubted_at != self._broken_at:
            self._doubted_at = self._broken_at
            self._timer = self._loop.call_later(AT_LAST_SECONDS, self._look)
        else:
            self._timeout.reschedule(self._loop.time())
