"""Processes of this replica: the warm process, a round's workers, and the c10d store at which ranks rendezvous.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Optional

from concertina_agent.core import events as e
from concertina_agent.files.files_driver import FilesDriver
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import STORAGE_API, AgentSettings
from concertina_agent.workers import rendezvous_store
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.local_workers import LocalWorkers
from concertina_agent.workers.preflight import preflight, skipped_because
from concertina_agent.workers.starters import BundledStarter, CommandStarter, Starter
from concertina_agent.workers.warm_start import WarmStart
from concertina_agent.workers.workers import ForkParent, ForkTarget, Process, start_command
from concertina_protocol import addresses
from concertina_protocol.log import log_event

TICK_SECONDS = 0.25
"""Maximum seconds between two ticks. A tick comes earlier if a deadline of another agent's silence ends before."""
LATER_SECONDS = 0.01
"""Seconds by which a tick follows the deadline that it serves, so that later deadlines can share the tick."""


class WorkersDriver:
    """Driver of this replica's processes."""

    def __init__(
        self,
        settings: AgentSettings,
        files: FilesDriver,
        channel: str,
        emit: Callable[[e.Event], None],
        tasks: TaskGroup,
        next_deadline: Callable[[float], float],
    ) -> None:
        """Prepare to start processes.

        Args:
            settings: Settings of the agent.
            files: Driver of the files in the volume.
            channel: Path of the socket between workers and the agent.
            emit: Function that passes an event to the state machine.
            tasks: Tasks that run as long as the agent.
            next_deadline: Function that returns the next time of the monotonic clock at which a tick is needed.
        """
        self._settings, self._files, self._channel, self._emit, self._tasks = settings, files, channel, emit, tasks
        self._next_deadline = next_deadline
        self._reaper = Reaper()
        self.parent: Optional[ForkParent] = None
        """Warm process from which the bundled trainer's processes are forked, or None for a user's own command."""
        self._bundled: Optional[BundledStarter] = None
        self._command: Optional[CommandStarter] = None
        self.local = LocalWorkers(settings, self._reaper, self._starter(), emit, TaskGroup(tasks.failed))
        self._store: Optional[socket.socket] = None
        """Bound socket for the next round's c10d store, or None."""

    def _starter(self) -> Starter:
        settings = self._settings
        if settings.bundled:
            self.parent = ForkParent(f"{settings.package}.preload", settings.environment, self._reaper)
            self._bundled = BundledStarter(settings, self.parent)
            return self._bundled
        self._command = CommandStarter(settings, self._reaper, self._emit)
        return self._command

    @property
    def warm_start(self) -> Optional[WarmStart]:
        """Warm start of the user's own command, or None if the replica has none."""
        return self._command.warm if self._command is not None else None

    def start(self) -> None:
        self._reaper.start()
        self._tasks.start("tick", self._tick())
        self._tasks.start("warm up", self._warm_up())
        self._tasks.start("preflight", self._preflight())

    async def stop(self) -> None:
        await self.local.kill()
        if self.parent is not None:
            self.parent.stop()
        if self._command is not None:
            self._command.stop()

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            await asyncio.sleep(min(TICK_SECONDS, self._next_deadline(now) - now + LATER_SECONDS))
            self._emit(self.local.poll())
            self.local.look_for_own_worlds()
            if self._command is not None:
                self._command.look()

    async def _warm_up(self) -> None:
        if self._command is not None:
            await self._command.warm_up()
        if self.parent is not None:
            self.parent.start()
        self._report_warm(error := await self.until_warm())
        if self._bundled is not None and not error:
            self._tasks.start("standby", self._bundled.standby.keep())
        if self.parent is not None and not error:
            self._report_warm(await self.parent.given_up)

    async def _preflight(self) -> None:
        environment = self._settings.environment
        if why := skipped_because(environment):
            log_event("preflight_skipped", why=why)
            return self._emit(e.PreflightDone())
        outcome = await preflight(environment, self._settings.volume, self._reaper)
        log_event("preflight", **dataclasses.asdict(outcome))
        return self._emit(e.GpuFaultSeen(outcome.fault, by_preflight=True) if outcome.fault else e.PreflightDone())

    def _report_warm(self, error: str) -> None:
        log_event("warm", error=error)
        self._emit(e.Warm(error))

    async def until_warm(self) -> str:
        """Wait until processes can be started. Return "", or the reason if no process can ever be started."""
        return await asyncio.shield(self.parent.warm) if self.parent is not None else ""

    async def start_uploader(self) -> Process:
        """Start the uploader.

        Raises StartError if it cannot be started.
        """
        settings = self._settings
        environment = {**settings.environment, "CONCERTINA_SOCKET": self._channel}
        if self.parent is not None:
            return await self.parent.run(ForkTarget(f"{settings.package}.uploader:main"), environment, "[uploader] ")
        line = [sys.executable, "-m", "concertina_state.uploader"]
        return start_command(line, self._with_storage(environment), self._reaper, "[uploader] ")

    def start_tracking(self) -> Process:
        """Start the tracking process.

        Raises StartError if it cannot be started.
        """
        command = {"CONCERTINA_COMMAND": shlex.join(self._settings.command)} if self._settings.command else {}
        environment = {**self._settings.environment, "CONCERTINA_SOCKET": self._channel, **command}
        environment["CONCERTINA_VOLUME"] = str(self._settings.volume)
        line = [sys.executable, "-m", "concertina_tracking"]
        return start_command(line, self._with_storage(environment), self._reaper, "[tracking] ")

    def _with_storage(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with a PYTHONPATH in which Python finds a client library of durable storage.

        This is needed because the image may not contain one.
        """
        path = [environment.get("PYTHONPATH", ""), str(self._settings.volume / STORAGE_API)]
        return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}

    # --- effects ----------------------------------------------------------------------------------------------------

    def kill_workers(self, effect: e.KillWorkers) -> None:
        self._tasks.start("kill workers", self._kill_and_scan(effect.round, self._files.persisted))

    async def _kill_and_scan(self, round: int, persisted: asyncio.Future[None]) -> None:
        replaced = await self.local.halt()
        await persisted
        self._emit(e.WorkersGone(round, self._files.snapshots.scan(), replaced))

    def bind_store(self, effect: e.BindStore) -> None:
        host = self._settings.pod_ip
        self._close_store()
        if self._settings.bundled:
            self._store = rendezvous_store.bind(host)
            port = self._store.getsockname()[1]
        else:
            port = rendezvous_store.reserve(host)
        self._emit(e.StoreBound(effect.round, effect.claim, addresses.join(host, port)))

    def start_round(self, effect: e.StartRound) -> None:
        listening, self._store = (self._store, None) if effect.coordinator else (None, self._store)
        self._close_store()
        folder = self._files.snapshots.round_folder(effect.assign.round)
        environment = {"CONCERTINA_SOCKET": self._channel, "CONCERTINA_SNAPSHOTS": str(folder)}
        self.local.start(effect.assign, effect.me, listening, environment)

    def send(self, effect: e.SendToWorker) -> None:
        self.local.send(effect.rank, effect.message)

    def signal(self, effect: e.SignalWorkers) -> None:
        self.local.signal(effect.signal)

    def collect_stacks(self, effect: e.CollectStacks) -> None:
        self.local.collect_stacks(effect.round)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None
