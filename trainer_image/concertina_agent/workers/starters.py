"""Start of workers: as a fork of a warm process that has imported their modules, or as an ordinary process."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Optional, Protocol

from concertina_agent.core import events as e
from concertina_agent.settings import AgentSettings
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.standby_process import StandbyProcess
from concertina_agent.workers.warm_start import WarmStart
from concertina_agent.workers.workers import ForkParent, ForkTarget, Process, StartError, start_command
from concertina_protocol.log import log_event


class Starter(Protocol):
    """Interface that starts workers."""

    async def until_warm(self) -> None:
        """Wait until workers can be started at once, for example until a warm process has imported their modules."""

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Optional[Process]:
        """Start a worker, or return None if the caller must wait (`until_warm`) and try again.

        Raises StartError if the worker cannot be started.
        """

    async def serve_store(self, listening: socket.socket) -> Process:
        """Start a process that serves the c10d store of the round.

        Raises StartError if the process cannot be started.
        """


class BundledStarter:
    """Starter of the bundled trainer's workers."""

    def __init__(self, settings: AgentSettings, parent: ForkParent) -> None:
        self._settings, self._parent = settings, parent
        self.standby = StandbyProcess(parent, settings.environment)

    async def until_warm(self) -> None:
        await asyncio.shield(self._parent.warm)

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Optional[Process]:
        return await self._run(ForkTarget(f"{self._settings.package}.worker:main"), environment, prefix)

    async def serve_store(self, listening: socket.socket) -> Process:
        target = ForkTarget(f"{self._settings.package}.store:serve", ("fd:0",), (listening.fileno(),))
        return await self._run(target, self._settings.environment, "[store] ")

    async def _run(self, target: ForkTarget, environment: Mapping[str, str], prefix: str) -> Process:
        standby = self.standby.take(target, environment, prefix)
        return standby if standby is not None else await self._parent.run(target, environment, prefix)


class CommandStarter:
    """Starter of the workers of a user's own command."""

    def __init__(self, settings: AgentSettings, reaper: Reaper, say: Callable[[e.WarmStartKnown], None]) -> None:
        self._command: Sequence[str] = settings.command
        self._reaper, self._report = reaper, say
        self._reported_state = e.WarmStartKnown()
        self.warm = WarmStart(settings, reaper) if settings.warm_start else None

    async def warm_up(self) -> None:
        """Prepare the warm start of the user's command, and return when workers can be started."""
        if self.warm is None:
            return
        self.warm.begin()
        if self.warm.imports_first:
            await self.warm.settled()
            self._report_state(self.warm)

    async def until_warm(self) -> None:
        if self.warm is not None:
            await self.warm.settled()

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Optional[Process]:
        if self.warm is not None:
            # Only one worker records its imports, because all run the same script.
            started = await self.warm.start(environment, record=local_rank == 0, prefix=prefix)
            self._report_state(self.warm)
            return started if isinstance(started, Process) else None
        return start_command(self._command, environment, self._reaper, prefix)

    async def serve_store(self, listening: socket.socket) -> Process:
        raise StartError("Worker 0 of a custom command serves the store itself.")

    def look(self) -> None:
        if self.warm is not None:
            self.warm.look()
            self._report_state(self.warm)

    def stop(self) -> None:
        if self.warm is not None:
            self.warm.stop()

    def _report_state(self, warm: WarmStart) -> None:
        """Report why the user's command has no warm start, or which modules its workers still import themselves."""
        state = e.WarmStartKnown(warm.why, warm.warm_start_skipped_modules)
        if state != self._reported_state:
            self._reported_state = state
            log_event("warm_start", **dataclasses.asdict(state))
            self._report(state)
