"""`concertina-agent trace`: from within a pod, a trace of some steps of one of its workers, on standard output."""

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
from concertina_protocol import addresses, traces

ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.2
LINE_BYTES = 6144
"""Of base64, which is read where lines are."""


def trace(rank: int, first_step: int, steps: int, seconds: float) -> int:
    """Base64 of a `traces.trace_file`; 1 where there is none, with a sentence."""
    from concertina_agent.net import tls
    from concertina_agent.net.wire import Connector

    name = secrets.token_hex(8)
    try:
        known = settings.read(os.environ, ())
        folder = traces.folder(known.volume)
        folder.mkdir(exist_ok=True)
        connector = Connector(tls.client_context(known.identity), known.uid)
        address = addresses.join(known.pod_ip, known.port)
        wish = p.Trace(known.uid, rank, first_step, steps, name)
        answer = asyncio.run(connector.ask(address, wish, ANSWER_SECONDS))
    except (settings.SettingsError, OSError, asyncio.TimeoutError, p.ProtocolError) as error:
        return _fail(f"the agent does not answer: {type(error).__name__}: {error}")
    if not isinstance(answer, p.Accepted):
        return _fail(answer.reason if isinstance(answer, p.Refused) else "the agent does not know of traces")
    return _print(traces.trace_file(folder, name, rank), seconds)


def _print(path: Path, seconds: float) -> int:
    """And forget the file, whatever happens."""
    error, give_up = traces.error_file(path), time.monotonic() + seconds
    try:
        while not path.exists() and not error.exists():
            if time.monotonic() > give_up:
                return _fail(f"no trace within {seconds:g} s: the steps did not end, or the round did")
            time.sleep(LOOK_SECONDS)
        if error.exists():
            return _fail(error.read_text())
        with path.open("rb") as file:
            while piece := file.read(LINE_BYTES):
                sys.stdout.buffer.write(base64.b64encode(piece) + b"\n")
        sys.stdout.flush()
        return 0
    finally:
        for each in (path, error):
            with contextlib.suppress(FileNotFoundError):
                each.unlink()


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1
