"""One connection to an agent: one request, and its answer or its stream."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina.agents.bounds import bounded
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection, connect

CALL_SECONDS = 5.0
"""An agent that has not answered by then counts as not having got the request."""

Request = protocol.Prepare | protocol.Assign | protocol.Drain | protocol.Save
Answer = protocol.Prepared | protocol.Accepted | protocol.Refused


class CallError(Exception):
    """No usable answer; a sentence."""


@dataclass(frozen=True)
class Identity:
    """What makes a connection one between this operator and this job's agents."""

    uid: str
    context: ssl.SSLContext

    @property
    def agent_name(self) -> str:
        return f"{self.uid}.agent"


@contextlib.asynccontextmanager
async def connection(identity: Identity, address: str, message: protocol.Message) -> AsyncIterator[Connection]:
    """On which `message` has been sent. Raises OSError."""
    opened = await connect(address, identity.context, identity.agent_name)
    try:
        await opened.send(message)
        yield opened
    finally:
        opened.close()


async def receive(connection: Connection, address: str) -> protocol.Message:
    """The next line; raises CallError where the stream ends or is none of this protocol."""
    try:
        message = await connection.receive()
    except ProtocolError as error:
        raise CallError(f"{address} sent what is not understood: {error}") from error
    if message is None:
        raise CallError(f"{address} closed the connection")
    return bounded(message)


async def call(identity: Identity, address: str, request: Request) -> Answer:
    """The agent's answer; raises CallError after CALL_SECONDS at the latest."""
    try:
        async with asyncio.timeout(CALL_SECONDS), connection(identity, address, request) as opened:
            answer = await receive(opened, address)
    except TimeoutError as error:
        raise CallError(f"{address} did not answer within {CALL_SECONDS:g} s") from error
    except (OSError, ssl.SSLError) as error:
        raise CallError(f"{address} can't be reached: {error}") from error
    except CallError:
        raise
    except Exception as error:
        # A call that ended unseen would be under way for ever, and is sent once.
        raise CallError(f"the call of {address} failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, protocol.Prepared | protocol.Accepted | protocol.Refused):
        raise CallError(f"{address} answered a {type(request).__name__} with a {type(answer).__name__}")
    return answer
