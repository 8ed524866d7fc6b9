"""Spare process of the bundled trainer, from the agent's side (decision "A spare process is forked ahead")."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from concertina_agent.workers.workers import ForkParent, ForkTarget, Process, StartError
from concertina_protocol.log import log_event

PAUSE_SECONDS = 3.0
"""Seconds between the use of a spare and the fork of the next one, so that the fork does not delay the new round."""


class _Spare(NamedTuple):
    process: Process
    control: socket.socket


class Spares:
    """Keeps one spare process, and turns it into a worker or a store."""

    def __init__(self, parent: ForkParent, environment: Mapping[str, str]) -> None:
        """Initialize without a spare. `environment` has its variables while it waits."""
        self._parent, self._environment = parent, environment
        self._spare: Optional[_Spare] = None
        self._taken = asyncio.Event()

    def take(self, target: ForkTarget, environment: Mapping[str, str], prefix: str) -> Optional[Process]:
        """Run the target in the spare, and return its process. Return None if there is no spare that can run it.

        The arguments of the target must be file descriptors.
        """
        spare, self._spare = self._spare, None
        self._taken.set()
        if spare is None:
            return None
        request = json.dumps({"run": target.run, "environment": dict(environment)}).encode()
        with spare.control:
            try:
                spare.process.lines.start_anew(prefix)
                socket.send_fds(spare.control, [request], target.fds)
                return spare.process
            except OSError as error:
                log_event("spare_unused", pid=spare.process.pid, why=str(error))
        spare.process.send_signal(signal.SIGKILL)
        return None

    async def keep(self) -> None:
        """Keep a spare ready. If one can't be forked, return."""
        while True:
            try:
                spare = self._spare = await self._forked()
            except (StartError, OSError) as error:
                return log_event("spare_failed", why=str(error))
            self._taken.clear()
            taken = asyncio.ensure_future(self._taken.wait())
            ends: set[asyncio.Future[Any]] = {taken, spare.process.ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            taken.cancel()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _forked(self) -> _Spare:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            target = ForkTarget("concertina_agent.workers.spare:stand_by", ("fd:0",), (child_end.fileno(),))
            try:
                process = await self._parent.run(target, self._environment)
            except BaseException:
                own_end.close()
                raise
        own_end.setblocking(False)
        log_event("spare_ready", pid=process.pid)
        return _Spare(process, own_end)
