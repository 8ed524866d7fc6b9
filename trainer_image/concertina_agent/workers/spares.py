"""The agent's end of spares: processes that wait to be the next new worker or store (decision "A spare is warm")."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Mapping
from typing import Any, Optional

from concertina_agent.workers.workers import ForkParent, ForkTarget, Process, StartError
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

WARM_SECONDS = 0.05
"""Seconds that a start waits for a spare that still warms up. A fork costs about as much more than a spare."""
PAUSE_SECONDS = 3.0
"""Seconds between the use of a spare and the fork of the next one, which would slow down the new worker's start."""
MAX_WORD = 64


class Spare:
    """Process that waits for its environment."""

    def __init__(self, kind: str, process: Process, control: socket.socket) -> None:
        self._kind, self.process, self._control = kind, process, control
        control.setblocking(False)
        self.warm = asyncio.ensure_future(self._until_warm())
        """Future whose result is False if the process has ended before it was warm."""

    async def _until_warm(self) -> bool:
        try:
            warm = bool(await asyncio.get_running_loop().sock_recv(self._control, MAX_WORD))
        except OSError:
            return False
        if warm:
            log_event("spare_ready", kind=self._kind, pid=self.process.pid)
        return warm

    async def use(self, environment: Mapping[str, str], prefix: str, fds: tuple[int, ...]) -> Optional[Process]:
        """Run the spare's target. If the spare is not warm in time, or is gone, end it and return None."""
        try:
            if await within(WARM_SECONDS, asyncio.shield(self.warm)):
                self.process.lines.start_anew(prefix)
                socket.send_fds(self._control, [json.dumps(dict(environment)).encode()], fds)
                return self.process
            why = "it has ended"
        except asyncio.TimeoutError:
            why = "it is not warm yet"
        except OSError as error:
            why = str(error)
        finally:
            self._close_when_warm()
        log_event("spare_unused", kind=self._kind, pid=self.process.pid, why=why)
        self.process.send_signal(signal.SIGKILL)
        return None

    def _close_when_warm(self) -> None:
        """Close the socket once nothing waits for it.

        The event loop would otherwise keep the file descriptor as one that it watches, and would never read the next
        file that gets its number, such as the output of a worker.
        """
        if self.warm.done():
            self._control.close()
        else:
            self.warm.add_done_callback(lambda _: self._control.close())


class Spares:
    """Spares of one kind, one at a time."""

    def __init__(
        self, parent: ForkParent, kind: str, warm_up: str, target: str, environment: Mapping[str, str]
    ) -> None:
        """Initialize without a process.

        Args:
            parent: Parent to fork.
            kind: Word that precedes what a spare prints.
            warm_up: See `spare.stand_by`.
            target: See `spare.stand_by`.
            environment: Variables while the process waits.
        """
        self._parent, self._kind, self._environment = parent, kind, environment
        self._arguments = ("fd:0", warm_up, target)
        self._spare: Optional[Spare] = None
        self._taken = asyncio.Event()

    async def take(
        self, environment: Mapping[str, str], prefix: str = "", fds: tuple[int, ...] = ()
    ) -> Optional[Process]:
        """Return a process that runs the target, or None if there is no spare."""
        spare, self._spare = self._spare, None
        self._taken.set()
        return await spare.use(environment, prefix, fds) if spare is not None else None

    async def keep(self) -> None:
        """Keep a spare, until one fails to warm up."""
        while True:
            try:
                spare = self._spare = await self._fork()
            except (StartError, OSError) as error:
                return log_event("spare_failed", kind=self._kind, why=str(error))
            self._taken.clear()
            if not await spare.warm and (code := await spare.process.ended) > 0:
                self._spare = None
                return log_event("spare_failed", kind=self._kind, why=f"it ended with {code}")
            await self._until_used(spare)
            self._spare = None
            await asyncio.sleep(PAUSE_SECONDS)

    async def _until_used(self, spare: Spare) -> None:
        """Wait until the spare is used, or ends."""
        taken = asyncio.ensure_future(self._taken.wait())
        ends: set[asyncio.Future[Any]] = {taken, spare.process.ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        taken.cancel()

    async def _fork(self) -> Spare:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        target = ForkTarget("concertina_agent.workers.spare:stand_by", self._arguments, (child_end.fileno(),))
        with contextlib.ExitStack() as stack:
            stack.callback(child_end.close)
            stack.callback(own_end.close)
            process = await self._parent.run(target, self._environment, f"[{self._kind}] ")
            stack.pop_all()
            child_end.close()
            return Spare(self._kind, process, own_end)
