"""Event loop of the agent, which connects `core.machine` with sockets, processes and files.

Sockets, processes and files produce events. The state machine in `core.machine` receives an event and returns effects,
such as a message to send. This module carries out the effects. Everything runs in one thread.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.tracking import TrackingRecorder
from concertina_agent.files.files_driver import FilesDriver
from concertina_agent.metrics.metrics_driver import MetricsDriver
from concertina_agent.net import tls
from concertina_agent.net.net_driver import NetworkDriver
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings
from concertina_agent.transfers.channel import ChannelServer, socket_path
from concertina_agent.transfers.copies import Peers
from concertina_agent.transfers.learning import ModuleLearning
from concertina_agent.transfers.tracking_process import SHIP_ALL_SECONDS, TrackingDriver
from concertina_agent.transfers.uploads import UploadDriver
from concertina_agent.workers.preflight import skipped_because
from concertina_agent.workers.workers_driver import WorkersDriver
from concertina_protocol import addresses, log
from concertina_protocol import worker_channel as w
from concertina_protocol.log import log_event
from concertina_protocol.tracking import spool

FAREWELL_SECONDS = 0.2
"""Seconds that an exiting agent waits so that its last messages can reach the coordinator and the operator."""
QUIET = (e.Tick, e.WorkerMessage, e.MemberMessage, e.CoordinatorMessage, e.PeerCopied, e.CopyHeld)
"""Frequent events, which are not written to the log."""


class Agent:
    """The agent of a replica, which is process 1 of its container."""

    def __init__(self, settings: AgentSettings) -> None:
        """Read the contents of the replica's volume, and prepare the agent to run.

        An event loop must already be running.

        Raises:
            OSError: If a file or folder is missing; the error names it.
            ssl.SSLError: If the certificates cannot be loaded.
        """
        self._settings = settings
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._events: collections.deque[e.Event] = collections.deque()
        self._busy = False
        self._tasks = TaskGroup(self._fail)
        emit, tasks = self.emit, self._tasks

        files = FilesDriver(settings.volume)
        self._core = AgentState(
            settings.replica,
            settings.uid,
            secrets.token_hex(8),
            settings.workers,
            bundled=settings.bundled,
            storage=p.Storage(p.StorageHealth.UNKNOWN) if settings.checkpoints and settings.bundled else None,
            storage_named=settings.checkpoints,
            seen=files.seen,
            held=files.snapshots.scan(),
            preflight=not skipped_because(settings.environment),
        )
        connector, channel = (
            Connector(tls.client_context(settings.identity), settings.uid),
            socket_path(settings.volume),
        )
        self._workers = workers = WorkersDriver(settings, files, channel, emit, tasks, self._core.next_deadline)
        self._uploads = uploads = UploadDriver(files.snapshots, emit)
        copies = Peers(settings.uid, settings.replica, connector, files.snapshots, emit, tasks, settings.even)
        learning = ModuleLearning(settings.uid, workers.warm_start, connector, emit, tasks)
        self._network = network = NetworkDriver(settings, self._core, connector, copies, learning, emit, tasks)
        self._metrics = MetricsDriver(settings, self._core, workers.local.running, uploads.shipping, emit)
        self._tracking: Optional[TrackingDriver] = None
        if settings.track_every:
            folder = spool.folder(settings.volume)
            self._tracking = TrackingDriver(
                folder, TrackingRecorder(settings.track_every), workers.start_tracking, emit
            )
        parts = (workers.local, copies, uploads, files.snapshots, self._tracking)
        self._channel = ChannelServer(channel, *parts, emit, lambda: self._core.latest)
        self._carry_out: Mapping[type, tuple[Callable[[Any], object], ...]] = {
            e.PersistSeen: (files.persist_seen,),
            e.KillWorkers: (network.leave_round, copies.stop, uploads.abandon, workers.kill_workers),
            e.BindStore: (workers.bind_store,),
            e.PingPeers: (network.ping_peers,),
            e.Reply: (network.reply,),
            e.StartRound: (copies.begin, uploads.begin, workers.start_round, network.join_coordinator),
            e.CopyFrom: (copies.copy_from,),
            e.DropSnapshots: (files.drop_snapshots,),
            e.SendToWorker: (workers.send,),
            e.SignalWorkers: (workers.signal,),
            e.CollectStacks: (workers.collect_stacks,),
            e.Broadcast: (network.broadcast,),
            e.ReportChanged: (network.report_changed,),
            e.Ship: (uploads.ship,),
            e.Publish: (uploads.publish,),
            e.Undo: (uploads.undo,),
            e.UseStorage: (self._use_storage,),
            e.ProbeStorage: (uploads.probe,),
            e.Exit: (self._leave,),
            e.IllegalTransition: (lambda effect: log_event("illegal_transition", what=effect.what),),
        }
        """Functions that carry out an effect, in the order of their calls, keyed by the class of the effect."""

    async def run(self) -> int:
        """Run the agent until it must exit, and return the process's exit code."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.emit, e.TerminationNotice(settings.grace))
        self._workers.start()
        self._channel.start()
        self._network.start()
        self._metrics.start()
        address = addresses.join(settings.pod_ip, settings.port)
        identity = {"instance": self._core.instance, "address": address, "seen": self._core.seen}
        log.serve(settings.uid, settings.job)
        log_event("agent_started", replica=settings.replica, **identity)
        if settings.checkpoints and settings.bundled:
            self._use_storage(e.UseStorage())
        if self._tracking is not None:
            self._tasks.start("tracking", self._tracking.keep_running())
            self._tasks.start("watch tracking", self._tracking.watch())
        try:
            code = await self._exit
            await asyncio.sleep(FAREWELL_SECONDS)
            await self._ship_all()
            return code
        finally:
            self._tasks.cancel()
            await self._network.stop()
            await self._workers.stop()
            self._channel.close()

    def emit(self, event: e.Event) -> None:
        """Pass an event to the state machine, and carry out the effects.

        An event that an effect emits is handled after all effects of the present event.
        """
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        except Exception as error:  # some effects may be missing, so exit and let the container restart
            self._fail(error)
            raise
        finally:
            self._busy = False

    def _handle(self, event: e.Event) -> None:
        unix_seconds = time.time()
        effects = machine.step(self._core, event, time.monotonic(), unix_seconds)
        self._metrics.on_event(event)
        if isinstance(event, e.WorkerMessage) and isinstance(event.message, (p.Progress, w.Beat)):
            log.reached(event.round, event.message.step)
        if not isinstance(event, QUIET):
            logged = event.message if isinstance(event, e.RequestReceived) else event
            log_event(type(logged).__name__, round=getattr(logged, "round", self._core.seen[0]))
        if self._tracking is not None:
            self._tracking.record(self._core, event, effects, unix_seconds)
        for effect in effects:
            for carry_out in self._carry_out[type(effect)]:
                carry_out(effect)

    def _use_storage(self, effect: e.UseStorage) -> None:
        start = self._workers.start_uploader
        self._tasks.start("uploader", self._uploads.keep_running(start, self._workers.until_warm))

    async def _ship_all(self) -> None:
        """Send all records of the run that the tracking tool has not received yet, before the agent exits.

        If the pod is being terminated, sending stops when the pod's grace period ends.
        """
        if self._tracking is not None:
            notice = self._core.notice
            remaining_seconds = notice.until - time.monotonic() if notice is not None else SHIP_ALL_SECONDS
            await self._tracking.ship_all(remaining_seconds)

    def _leave(self, effect: e.Exit) -> None:
        if not self._exit.done():
            log_event("agent_exits", code=effect.code)
            self._exit.set_result(effect.code)

    def _fail(self, error: BaseException) -> None:
        """Write an unexpected error to the log, and end the agent. The operator then replaces the pod."""
        if not self._exit.done():
            self._exit.set_exception(error)
