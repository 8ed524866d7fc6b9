"""Standby process of the bundled trainer, from the agent's side (decision "A standby process is forked in advance")."""

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
"""Seconds between the use of a standby process and the fork of the next one. The fork then does not delay the round."""


class _Waiting(NamedTuple):
    process: Process
    control: socket.socket


class StandbyProcess:
    """Owner of one standby process, which it turns into a worker or a store."""

    def __init__(self, parent: ForkParent, environment: Mapping[str, str]) -> None:
        """Initialize without a process.

        The standby process will have the variables in `environment` until it is used.
        """
        self._parent, self._environment = parent, environment
        self._waiting: Optional[_Waiting] = None
        self._taken = asyncio.Event()

    def take(self, target: ForkTarget, environment: Mapping[str, str], prefix: str) -> Optional[Process]:
        """Run the target in the standby process, and return the process.

        The result is None if there is no standby process that can run the target. The arguments of the target must be
        file descriptors.
        """
        standby, self._waiting = self._waiting, None
        self._taken.set()
        if standby is None:
            return None
        if standby.process.ended.done():
            standby.control.close()
            return None
        request = json.dumps({"run": target.run, "environment": dict(environment)}).encode()
        with standby.control:
            try:
                standby.process.lines.start_anew(prefix)
                socket.send_fds(standby.control, [request], target.fds)
                return standby.process
            except OSError as error:
                log_event("standby_unused", pid=standby.process.pid, why=str(error))
        standby.process.send_signal(signal.SIGKILL)
        return None

    async def keep(self) -> None:
        """Keep a standby process ready. If a fork fails, try again later."""
        while True:
            try:
                standby = await self._forked()
            except (StartError, OSError) as error:
                log_event("standby_failed", why=str(error))
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if self._waiting is not None:  # it has ended
                self._waiting.control.close()
            self._waiting = standby
            self._taken.clear()
            taken = asyncio.ensure_future(self._taken.wait())
            ends: set[asyncio.Future[Any]] = {taken, standby.process.ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            taken.cancel()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _forked(self) -> _Waiting:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            target = ForkTarget("concertina_agent.workers.standby:stand_by", ("fd:0",), (child_end.fileno(),))
            try:
                process = await self._parent.run(target, self._environment)
            except BaseException:
                own_end.close()
                raise
        own_end.setblocking(False)
        log_event("standby_ready", pid=process.pid)
        return _Waiting(process, own_end)
