"""Command `concertina-agent trace`: print a trace of some steps of a worker of this pod on standard output."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import sys
import time
from pathlib import Path

import concertina_protocol as p
from concertina_agent import settings
from concertina_protocol import addresses, step_traces

ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.2
LINE_BYTES = 6144
"""Number of bytes of the trace that are encoded into one line of the output."""


def trace(rank: int, first_step: int, steps: int, seconds: float) -> int:
    """Request a trace, and print the file `step_traces.trace_file` in base64.

    The result is the exit code. If there is no trace, it is 1, and a sentence is printed on stderr.
    """
    name = secrets.token_hex(8)
    try:
        agent_settings = settings.read(os.environ, ())
        path = step_traces.trace_file(step_traces.folder(agent_settings.volume), name, rank)
        path.parent.mkdir(exist_ok=True)
    except (settings.AgentSettingsError, OSError) as error:
        return _fail(f"the trace can't be stored: {error}")
    try:
        step_traces.wanted_file(path).touch()
        request = p.Trace(agent_settings.uid, rank, first_step, steps, name)
        return _ask(agent_settings, request) or _print(path, seconds)
    except OSError as error:
        return _fail(f"no trace was recorded: {error}")
    finally:
        for file in (step_traces.wanted_file(path), path, step_traces.error_file(path)):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


def _ask(agent_settings: settings.AgentSettings, request: p.Trace) -> int:
    """Send the request to the agent. Return 0 if the agent accepts it, otherwise 1."""
    from concertina_agent.net import tls
    from concertina_agent.net.wire import Connector

    try:
        connector = Connector(tls.client_context(agent_settings.identity), agent_settings.uid)
        address = addresses.join(agent_settings.pod_ip, agent_settings.port)
        answer = asyncio.run(connector.ask(address, request, ANSWER_SECONDS))
    except (OSError, asyncio.TimeoutError, p.ProtocolError) as error:
        return _fail(f"the agent does not answer: {type(error).__name__}: {error}")
    if not isinstance(answer, p.Accepted):
        return _fail(
            answer.reason
            if isinstance(answer, p.Refused)
            else "the agent does not support traces: use a newer version of the agent"
        )
    return 0


def _print(path: Path, seconds: float) -> int:
    error, give_up = step_traces.error_file(path), time.monotonic() + seconds
    while not path.exists() and not error.exists():
        if time.monotonic() > give_up:
            return _fail(f"no trace within {seconds:g} s: the steps were not finished, or the round ended")
        time.sleep(LOOK_SECONDS)
    if error.exists():
        return _fail(error.read_text())
    with path.open("rb") as file:
        while piece := file.read(LINE_BYTES):
            sys.stdout.buffer.write(base64.b64encode(piece) + b"\n")
    sys.stdout.flush()
    return 0


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1
