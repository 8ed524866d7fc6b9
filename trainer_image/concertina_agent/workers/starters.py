"""How a worker is started: the bundled trainer as a fork of its parent, a command of one's own warm or plainly."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Optional, Protocol

from concertina_agent.core import events as e
from concertina_agent.settings import AgentSettings
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.warm_start import Again, WarmProcess, warm_start
from concertina_agent.workers.workers import ForkParent, ForkTarget, Process, StartError, start_command
from concertina_protocol.log import log_event


class Starter(Protocol):
    async def until_warm(self) -> None:
        """Until there is nothing to wait for any more."""

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Optional[Process]:
        """A worker; None where one should wait (`until_warm`) and ask again. Raises StartError."""

    async def serve_store(self, listening: socket.socket) -> Process:
        """A process that serves the round's store. Raises StartError."""


class BundledStarter:
    def __init__(self, settings: AgentSettings, parent: ForkParent) -> None:
        self._settings, self._parent = settings, parent

    async def until_warm(self) -> None:
        await asyncio.shield(self._parent.warm)

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Optional[Process]:
        return await self._parent.run(ForkTarget(f"{self._settings.package}.worker:main"), environment, prefix)

    async def serve_store(self, listening: socket.socket) -> Process:
        target = ForkTarget(f"{self._settings.package}.store:serve", ("fd:0",), (listening.fileno(),))
        return await self._parent.run(target, self._settings.environment, "[store] ")


class CommandStarter:
    def __init__(self, settings: AgentSettings, reaper: Reaper, say: Callable[[e.WarmStartKnown], None]) -> None:
        self._command: Sequence[str] = settings.command
        self._reaper, self._say = reaper, say
        self._said = e.WarmStartKnown()
        made = warm_start(settings, reaper) if settings.warm_start else ""
        self.warm = made if isinstance(made, WarmProcess) else None
        self._unsuited = made if isinstance(made, str) else ""

    async def warm_up(self) -> None:
        """Until workers can be asked for."""
        if self.warm is None:
            return self._remark(self._unsuited)
        self.warm.begin()
        if self.warm.imports_first:
            await self.warm.settled()
            self._remark(self.warm.why)
        return None

    async def until_warm(self) -> None:
        if self.warm is not None:
            await self.warm.settled()

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Optional[Process]:
        if self.warm is not None:
            # One of them writes down what is imported: they are the same script.
            forked = await self.warm.start(environment, record=local_rank == 0, prefix=prefix)
            if isinstance(forked, Again):
                return None
            self._remark("" if isinstance(forked, Process) else forked)
            if isinstance(forked, Process):
                return forked
        return start_command(self._command, environment, self._reaper, prefix)

    async def serve_store(self, listening: socket.socket) -> Process:
        raise StartError("Worker 0 of a command of your own serves the store.")

    def look(self) -> None:
        if self.warm is not None:
            self.warm.look()
            self._remark(self._said.warm_start_disabled_reason)

    def stop(self) -> None:
        if self.warm is not None:
            self.warm.stop()

    def _remark(self, why: str) -> None:
        """`why`: the command starts plainly; empty where it does not."""
        known = e.WarmStartKnown(why, self.warm.warm_start_skipped_modules if self.warm is not None else "")
        if known != self._said:
            self._said = known
            log_event("warm_start", **dataclasses.asdict(known))
            self._say(known)
