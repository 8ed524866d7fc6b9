"""The watch stream of one agent, opened again and again while it is wanted."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

import concertina_protocol as protocol
from concertina import backoff
from concertina.agents.calls import CallError, Identity, connection, receive
from concertina.plan.observed import ConnectionRefusal

log = logging.getLogger(__name__)
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
"""Until a stream is opened again."""
OnReport = Callable[[protocol.Report], None]
OnLost = Callable[[str, ConnectionRefusal | None], None]
"""Called with a sentence, and how the host turned the stream away, where it is there."""


async def follow(identity: Identity, address: str, on_report: OnReport, on_lost: OnLost) -> None:
    """Calls `on_report` with each report, and `on_lost` whenever the stream can't be opened, breaks or is silent for
    protocol.SILENCE_SECONDS. Runs until it is cancelled."""
    failures = 0

    def fresh(report: protocol.Report) -> None:
        nonlocal failures
        failures = 0
        on_report(report)

    while True:
        on_lost(*await _stream(identity, address, fresh))
        await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
        failures += 1


async def _stream(identity: Identity, address: str, on_report: OnReport) -> tuple[str, ConnectionRefusal | None]:
    """One stream from its start to its end; what is to be told to `on_lost`."""
    try:
        async with asyncio.timeout(protocol.SILENCE_SECONDS) as silence:
            async with connection(identity, address, protocol.Watch(identity.uid)) as opened:
                while True:
                    message = await receive(opened, address)
                    silence.reschedule(asyncio.get_running_loop().time() + protocol.SILENCE_SECONDS)
                    if isinstance(message, protocol.Refused):
                        return f"{address} refused to be watched: {message.reason}", None
                    if isinstance(message, protocol.Report):
                        on_report(message)
    except TimeoutError:
        return f"{address} was silent for {protocol.SILENCE_SECONDS:g} s", None
    except ConnectionRefusedError:
        return f"nobody listens at {address}", ConnectionRefusal.NOT_LISTENING
    except ssl.SSLCertVerificationError as error:
        # Where the agents' certificate is of our CA, so is the CA that they check ours by: both are in one Secret.
        return f"{address} has another master key: {error}", ConnectionRefusal.OTHER_KEY
    except (OSError, ssl.SSLError) as error:
        return f"{address} can't be reached: {error}", None
    except CallError as error:
        return str(error), None
    except Exception as error:
        # Whatever an agent sends: a stream that ended unseen would count as open for ever.
        log.exception("the watch of %s failed", address)
        return f"the watch of {address} failed: {type(error).__name__}: {error}", None
