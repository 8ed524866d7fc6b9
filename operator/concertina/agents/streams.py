"""The watch stream of one agent, opened again and again while it is wanted."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina import backoff
from concertina.agents.calls import CallError, ClosedError, Identity, connection, receive
from concertina.plan.observed import ConnectionRefusal

log = logging.getLogger(__name__)
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
"""Until a stream is opened again."""
OnReport = Callable[[protocol.Report], None]


@dataclass(frozen=True)
class Lost:
    """How a stream ended, or an attempt to open it."""

    sentence: str
    refusal: ConnectionRefusal | None = None
    """How the host turned it away, where it is there."""
    closed: bool = False
    """The host closed it."""


OnLost = Callable[[Lost], None]


async def follow(
    identity: Identity, address: str, on_begun: Callable[[], None], on_report: OnReport, on_lost: OnLost
) -> None:
    """Calls `on_begun` when a stream begins to be opened, `on_report` with each report, and `on_lost` whenever it can't
    be opened, breaks or is silent for protocol.SILENCE_SECONDS. Runs until it is cancelled."""
    failures = 0

    def fresh(report: protocol.Report) -> None:
        nonlocal failures
        failures = 0
        on_report(report)

    while True:
        lost = await _stream(identity, address, on_begun, fresh)
        try:
            on_lost(lost)
        except Exception:  # of whoever hears it: the stream is opened again all the same
            log.exception("%s: that could not be told", lost.sentence)
        await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
        failures += 1


async def _stream(identity: Identity, address: str, on_begun: Callable[[], None], on_report: OnReport) -> Lost:
    """One stream from its start to its end."""
    try:
        last: protocol.Report | None = None
        async with connection(identity, address, protocol.Watch(identity.uid, changes=True), on_begun) as opened:
            async with asyncio.timeout(protocol.SILENCE_SECONDS) as silence:
                while True:
                    message = await receive(opened, address)
                    silence.reschedule(asyncio.get_running_loop().time() + protocol.SILENCE_SECONDS)
                    if isinstance(message, protocol.Refused):
                        return Lost(f"{address} refused to be watched: {message.reason}")
                    if isinstance(message, protocol.ReportChange):
                        if last is None:
                            return Lost(f"{address} told of a change before there was a report")
                        message = protocol.changed(last, message)
                    if isinstance(message, protocol.Report):
                        last = message
                        on_report(message)
    except TimeoutError:
        return Lost(f"{address} was silent for {protocol.SILENCE_SECONDS:g} s")
    except ConnectionRefusedError:
        return Lost(f"nobody listens at {address}", ConnectionRefusal.NOT_LISTENING)
    except ssl.SSLCertVerificationError as error:
        # Where the agents' certificate is of our CA, so is the CA that they check ours by: both are in one Secret.
        return Lost(f"{address} has another master key: {error}", ConnectionRefusal.OTHER_KEY)
    except (OSError, ssl.SSLError) as error:
        return Lost(f"{address} can't be reached: {error}", closed=isinstance(error, ConnectionResetError))
    except protocol.ProtocolError as error:
        return Lost(f"{address} sent what is not understood: {error}")
    except CallError as error:
        return Lost(str(error), closed=isinstance(error, ClosedError))
    except Exception as error:
        # Whatever an agent sends: a stream that ended unseen would count as open for ever.
        log.exception("the watch of %s failed", address)
        return Lost(f"the watch of {address} failed: {type(error).__name__}: {error}")
