"""Faults around an operator, in its own process, as files in the folder FAULTS say at each moment.

cut     addresses of agents, or *, that the operator can't reach or hear, although it reaches the API server
clock   seconds by which the time of day is set forward or back
raise   names of jobs whose passes raise

Delays of half a minute are some seconds here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

from concertina.agents import calls
from concertina.plan import plan
from concertina.plan.actions import Plan
from concertina.plan.facts import constants
from concertina.plan.observed import JobObservation
from concertina_protocol import addresses, connection

FAULTS = Path(os.environ["FAULTS"])
constants.UNHEARD = 3.0

_true_time, _dial, _receive = time.time, calls.dial, connection.Connection.receive_line
_plan = plan.plan


def _said(fault: str) -> str:
    path = FAULTS / fault
    return path.read_text() if path.exists() else ""


def _cut(address: str) -> bool:
    return bool({"*", address}.intersection(_said("cut").split()))


async def _dial_unless_cut(made: socket.socket, host: str, port: int) -> socket.socket:
    while _cut(addresses.join(host, port)):
        await asyncio.sleep(0.1)  # for longer than the caller waits
    return await _dial(made, host, port)


async def _receive_unless_cut(self: connection.Connection, timeout: float | None = None) -> bytes | None:
    while True:
        line = await _receive(self, timeout)
        if line is None or not _cut(addresses.join(*self.writer.get_extra_info("peername")[:2])):
            return line


def _plan_unless_raised(observed: JobObservation, now: float) -> Plan:
    if observed.job.name in _said("raise").split():
        raise ZeroDivisionError("planted")
    return _plan(observed, now)


plan.plan = _plan_unless_raised
calls.dial = _dial_unless_cut
connection.Connection.receive_line = _receive_unless_cut  # type: ignore[method-assign]
time.time = lambda: _true_time() + float(_said("clock") or 0)
