"""All that this operator says to agents and hears from them, by job and replica."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import itertools
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import concertina_protocol as protocol
from concertina import metrics
from concertina.agents.agent_lines import HeldLines
from concertina.agents.allowance import Allowance
from concertina.agents.authority import Authority
from concertina.agents.bounds import LineLimits, line_limits
from concertina.agents.calls import HANDSHAKES, RELAY_SECONDS, CallError, ConnectionIdentity, call, relay
from concertina.agents.hearing import AgentConnectivityMonitor
from concertina.agents.stall import TICK_SECONDS, StallDetector, begun, is_same_call, later
from concertina.agents.streams import Lost, StreamEnd, follow, is_idle
from concertina.api.pod_names import parse
from concertina.plan.actions import Send
from concertina.plan.facts import constants
from concertina.plan.observed import AgentView, Call
from concertina.turns import FairLimiter
from concertina_protocol.traces import trace_id

log = logging.getLogger(__name__)
CALLS = {
    protocol.Prepare: "prepare",
    protocol.Assign: "assign",
    protocol.Drain: "drain",
    protocol.Save: "save",
}
"""Where in AgentView the call of a message stands."""
RELAYED_ABOVE = 32
"""Agents to whom the same is said: then some of them pass it on (decision "Agents pass on what the operator says")."""
OFFSET_SECONDS = 0.001
"""Between two clocks read one after the other, at most, while nobody has set one."""
EACH_SECONDS = 0.005
"""More patience with a relay for each that is asked: there are as many parts as each has entries."""
NUMBERS_A_SECOND, FASTEST_SECONDS, SLOWEST_SECONDS = 100.0, 0.25, 10.0
"""Reports of mere numbers of progress, from all jobs together; and between two of one job, at least and at most: of a
coordinator that dies, its steps since then are not known (decision "Numbers at a pace")."""
RETRY_SECONDS = 0.5
"""A call that failed is not sent again earlier."""
TOGETHER_SECONDS = 0.02
"""While agents are called, what comes in is told together, and at once with the last answer (decision "Calls go over
the stream that is open")."""


class CallResult(enum.StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"


class StreamState(enum.StrEnum):
    OPENING = "opening"
    OPEN = "open"
    LOST = "lost"
    """It was open, and is being opened again."""


metrics.begin_at_zero(metrics.AGENT_CALLS, CALLS.values(), CallResult)
Changed = Callable[[str, bool], None]
"""Called with the job's uid, and whether it matters at once (False: only progress)."""


@dataclass
class AgentConnection:
    view: AgentView = field(default_factory=AgentView)
    address: str = ""
    """Of the open stream; empty without one."""
    waits: bool = False
    """Whether its job had no round yet when the stream was opened."""
    knows_coordinator: bool = False
    """Whether the agent was told of one when the stream was opened."""
    stream: asyncio.Task[None] | None = None
    _told: tuple[AgentView, float, AgentView] | None = None

    def told(self, offset: float) -> AgentView:
        """The view with its times so much later: the very same one as last time where nothing has changed, for of a
        thousand agents few have between two passes."""
        if self._told is None or self._told[0] is not self.view or abs(self._told[1] - offset) > OFFSET_SECONDS:
            self._told = (self.view, offset, later(self.view, offset))
        return self._told[2]


@dataclass
class _JobConnections:
    identity: ConnectionIdentity
    connections: dict[str, AgentConnection] = field(default_factory=dict)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    unanswered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls under way, by kind and claim."""
    tell_timer: asyncio.TimerHandle | None = None
    """When what has come in is told, where more is to come."""
    members: int = 0
    """That its world has had at most."""

    @property
    def coordinator(self) -> str:
        """The address of the agent that coordinates a round, as far as it is heard; empty where there is none."""
        connections = self.connections.values()
        return next((each.address for each in connections if each.view.report and each.view.report.coordinator), "")


class AgentConnections:
    def __init__(
        self,
        changed: Changed,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """`clock`: for how long an agent was silent must not depend on who sets the time of day. `may_act`: False while
        another operator may be the one that acts; then no agent is called."""
        self._changed = changed
        self._clock = clock
        self._wall = wall
        self._may_act = may_act
        self._jobs: dict[str, _JobConnections] = {}
        self.hearing = AgentConnectivityMonitor()
        self._handshakes = FairLimiter(HANDSHAKES)
        self._allowances: dict[str, Allowance] = {}
        """By namespace."""
        self._held_lines: WeakValueDictionary[str, HeldLines] = WeakValueDictionary()
        """By namespace, while it has a job."""
        self._deriving = ThreadPoolExecutor(1, "keys")  # more of them would take the interpreter from the event loop
        self._stalls = StallDetector(clock())

    def set_gauges(self) -> None:
        """The metrics of the streams that there are now."""
        connections = (connection for job in self._jobs.values() for connection in job.connections.values())
        states = Counter(_state(each.view) for each in connections if each.stream is not None)
        metrics.set_all(metrics.AGENT_STREAMS, {state: states[state] for state in StreamState})
        metrics.OPERATOR_ISOLATED.set(self.hearing.operator_isolated)

    def views(self, uid: str) -> Mapping[str, AgentView]:
        """With times in Unix seconds."""
        self._take_out_stall()
        job = self._jobs.get(uid)
        unix = self._wall() - self._clock()
        return {name: connection.told(unix) for name, connection in job.connections.items()} if job else {}

    async def open(self, uid: str, created: float, master_key: bytes, namespace: str = "", members: int = 1) -> None:
        """Make the job known; its keys are derived once, beside the event loop: a thousand jobs take seconds.
        `members`: that its world may have now."""
        if uid not in self._jobs:
            made = asyncio.get_running_loop().run_in_executor(self._deriving, _client_context, master_key, uid, created)
            context = await made
            allowance = self._allowance(namespace)
            held_lines = self._held_lines.setdefault(namespace, HeldLines())
            self._jobs[uid] = _JobConnections(
                ConnectionIdentity(
                    uid,
                    context,
                    namespace,
                    self._handshakes,
                    allowance,
                    held_lines,
                    line_limits=functools.partial(self._line_limits, uid),
                    may_act=self._may_act,
                )
            )
        job = self._jobs[uid]
        job.members = max(job.members, members)

    def _line_limits(self, uid: str) -> LineLimits:
        job = self._jobs.get(uid)
        return line_limits(job.members if job else 0)

    def _allowance(self, namespace: str) -> Allowance:
        """One for all jobs of the namespace, and the same for a job that is made again: what is owed stays owed."""
        if namespace not in self._allowances:
            used = {job.identity.namespace for job in self._jobs.values()}
            for name, allowance in list(self._allowances.items()):
                if name not in used and allowance.untouched:
                    del self._allowances[name]
            self._allowances[namespace] = Allowance(namespace=namespace)
        return self._allowances[namespace]

    def watch(self, uid: str, wanted: Mapping[str, str], waits: bool = False) -> None:
        """Open the streams of `wanted` (replica to address) and close all others of the job, those that carry a call
        once that has ended. Nothing where the job was forgotten while its pass was under way. `waits`: it has no round
        yet (decision "Who waits speaks rarely"). Idle agents are asked anew once it has one, and once its coordinator
        is known (decision "New pods ask the coordinator what to import")."""
        job = self._jobs.get(uid)
        if job is None:
            return
        for replica, connection in job.connections.items():
            if connection.stream is None:
                continue
            news = not waits and (connection.waits or (not connection.knows_coordinator and bool(job.coordinator)))
            outdated = news and is_idle(connection.view.report)
            unwanted = wanted.get(replica) != connection.address
            if outdated or (unwanted and not _is_called(connection.view)):
                self._close(uid, replica, connection)
        for replica, address in wanted.items():
            connection = job.connections.setdefault(replica, AgentConnection())
            if connection.stream is None:
                connection.waits = waits
                self._open(job, replica, connection, address)

    def send(self, uid: str, sends: Iterable[Send]) -> list[Send]:
        """Send in the background; those that were sent: all but where the same call is under way, answered, or has
        failed just now, and where the job was forgotten while its pass was under way."""
        job = self._jobs.get(uid)
        if job is None:
            return []
        due = [(send, call) for send in sends if (call := self._begin(job, send)) is not None]
        for _, same in itertools.groupby(due, key=lambda each: id(each[0].message)):
            batch = list(same)
            if len(batch) <= RELAYED_ABOVE:
                for send, call in batch:
                    self._start(job, self._call(job, send, call))
            else:
                line = protocol.encode(batch[0][0].message).decode().rstrip("\n")
                for part in _parts(batch, job):
                    self._start(job, self._relay(job, line, part))
        return [send for send, _ in due]

    def _start(self, job: _JobConnections, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        job.calls.add(task)
        task.add_done_callback(job.calls.discard)

    def _begin(self, job: _JobConnections, send: Send) -> Call | None:
        """The call, which stands in the view from now on; None where it is not to be made now."""
        uid, message = job.identity.uid, send.message
        connection = job.connections.setdefault(send.replica, AgentConnection())
        kind = CALLS[type(message)]
        now = self._clock()
        before: Call | None = getattr(connection.view, kind)
        under_way = Call.of(message, now)
        if before is not None and before.covers(under_way):
            if before.failed_at is None:
                return None
            if now < before.failed_at + RETRY_SECONDS:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed, uid, True)
                return None
        connection.view = _with_call(connection.view, kind, under_way)
        job.unanswered[kind, under_way.claim] += 1
        return under_way

    def keep(self, uid: str, replicas: set[str]) -> None:
        """Forget what is known of all other replicas: their pods are gone."""
        job = self._jobs.get(uid)
        for replica in list(job.connections) if job else ():
            assert job is not None
            if replica not in replicas:
                self._close(uid, replica, job.connections.pop(replica))

    def forget(self, uid: str) -> None:
        job = self._jobs.pop(uid, None)
        if job is None:
            return
        job.identity.kept.close()
        for task in job.calls:
            task.cancel()
        if job.tell_timer is not None:
            job.tell_timer.cancel()
        for replica, connection in job.connections.items():
            self._close(uid, replica, connection)

    def close(self) -> None:
        for uid in list(self._jobs):
            self.forget(uid)
        self._deriving.shutdown(wait=False, cancel_futures=True)

    async def notice_stalls(self) -> None:
        """Of this operator, without end."""
        self._stalls = StallDetector(self._clock())
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._take_out_stall()

    def _take_out_stall(self) -> None:
        seconds = self._stalls.seconds(self._clock())
        if not seconds:
            return
        log.warning("this operator stood still for %.1f s", seconds)
        metrics.STALL_SECONDS.inc(seconds)
        for job in self._jobs.values():
            for connection in job.connections.values():
                # As if the time of the stall had not passed.
                connection.view = later(connection.view, seconds)

    async def _call(self, job: _JobConnections, send: Send, under_way: Call) -> None:
        waits = functools.partial(self._on_waits, job, [(send, under_way)])
        try:
            self._end(job, send, under_way, reply=await call(job.identity, send.address, send.message, waits))
        except CallError as error:
            self._end(job, send, under_way, error=str(error))

    async def _relay(self, job: _JobConnections, line: str, part: list[tuple[Send, Call]]) -> None:
        """The first of them is to pass it on to the others; whoever could not be asked so is called from here."""
        waiting = {send.replica: (send, under_way) for send, under_way in part}
        addresses = {send.replica: send.address for send, _ in part}
        silence = RELAY_SECONDS + len(part) ** 2 * EACH_SECONDS
        waits = functools.partial(self._on_waits, job, part)
        async for replica, reply in relay(job.identity, part[0][0].address, line, addresses, silence, waits):
            self._end(job, *waiting.pop(replica), reply=reply)
        await asyncio.gather(*(self._call(job, *each) for each in waiting.values()))

    def _on_waits(self, job: _JobConnections, part: list[tuple[Send, Call]], turn: bool) -> None:
        """Of the calls of one connection."""
        for send, under_way in part:
            self._change(job, send, under_way, sent_at=None if turn else self._clock())

    def _end(self, job: _JobConnections, send: Send, under_way: Call, **end: Any) -> None:
        kind = CALLS[type(send.message)]
        metrics.AGENT_CALLS.labels(kind, _result(end.get("reply"))).inc()
        job.unanswered[kind, under_way.claim] -= 1
        is_last = not job.unanswered[kind, under_way.claim]
        if is_last:
            del job.unanswered[kind, under_way.claim]
        if self._change(job, send, under_way, done_at=self._clock(), **end):
            self._tell(job, at_once=is_last)

    def _tell(self, job: _JobConnections, at_once: bool) -> None:
        """That something has changed which matters."""
        if job.tell_timer is not None:
            if not at_once:
                return
            job.tell_timer.cancel()
            job.tell_timer = None
        if at_once:
            self._changed(job.identity.uid, True)
        else:
            loop = asyncio.get_running_loop()
            job.tell_timer = loop.call_later(TOGETHER_SECONDS, self._tell, job, True)

    def _change(self, job: _JobConnections, send: Send, under_way: Call, **changes: Any) -> bool:
        """Of the call as the replica's view has it; whether it is still there: its pod may be gone, or a later call of
        its kind was made."""
        kind = CALLS[type(send.message)]
        connection = job.connections.get(send.replica)
        known: Call | None = getattr(connection.view, kind) if connection else None
        if connection is None or known is None or not is_same_call(known, under_way):
            return False
        connection.view = _with_call(connection.view, kind, dataclasses.replace(known, **changes))
        return True

    def _open(self, job: _JobConnections, replica: str, connection: AgentConnection, address: str) -> None:
        uid = job.identity.uid

        def on_waits(turn: bool) -> None:
            view, now = connection.view, self._clock()
            connection.view = dataclasses.replace(view, queued_at=now) if turn else begun(view, now)

        def on_report(report: protocol.Report) -> None:
            if report.replica != replica:
                on_lost(Lost(f"{address} is not {replica} but {report.replica}", StreamEnd.OTHER_REPLICA))
                metrics.AGENT_STREAM_ENDS.labels(StreamEnd.OTHER_REPLICA).inc()
                return
            before = connection.view
            if assign := _assigned(before, report):
                trace = {"trace_id": trace_id(uid, report.round)}
                metrics.ROUND_START_SECONDS.observe(assign.waited_for(self._clock()), trace)
            connection.view = _with_report(before, report, self._clock())
            if connection.view != before:
                self.hearing.update(uid, replica, connection.view)
                if _matters(before, connection.view):
                    self._tell(job, at_once=not job.unanswered)
                else:
                    self._changed(uid, False)

        def on_lost(lost: Lost) -> None:
            before = connection.view
            after = dataclasses.replace(begun(before, self._clock()), connected=False, refusal=lost.refusal)
            if before.connected:
                after = dataclasses.replace(after, closed=lost.end is StreamEnd.CLOSED)
            if before.alive and not after.alive:
                after = dataclasses.replace(after, lost_at=self._clock())
            connection.view = after
            if after != before:
                log.info("watch of %s: %s", replica, lost.sentence)
                self.hearing.update(uid, replica, after)
                self._changed(uid, True)

        def ask() -> protocol.Watch:
            coordinator = "" if connection.waits else job.coordinator
            connection.knows_coordinator = bool(coordinator)
            return asked(connection.waits, uid, len(self._jobs), coordinator)

        connection.address = address
        connection.view = dataclasses.replace(
            connection.view, wanted_at=None, lost_at=None, queued_at=None, closed=False, refusal=None
        )
        connection.stream = asyncio.create_task(
            follow(job.identity, address, ask, on_waits, on_report, on_lost),
            name=f"watch {replica}",
        )

    def _close(self, uid: str, replica: str, connection: AgentConnection) -> None:
        if connection.stream is not None:
            connection.stream.cancel()
            metrics.AGENT_STREAM_ENDS.labels(StreamEnd.NOT_WANTED).inc()
        connection.stream, connection.address = None, ""
        connection.view = dataclasses.replace(connection.view, connected=False, wanted_at=None, queued_at=None)
        self.hearing.update(uid, replica, connection.view)


def _parts(batch: list[tuple[Send, Call]], job: _JobConnections) -> list[list[tuple[Send, Call]]]:
    """As many as each has entries, always with the same replicas: connections among them are kept. The first of each is
    one that is heard, where there is one."""
    count = math.isqrt(len(batch) - 1) + 1
    parts: list[list[tuple[Send, Call]]] = [[] for _ in range(count)]
    for position, each in enumerate(batch):
        name = parse(each[0].replica)
        parts[(position if name is None or name.index is None else name.index) % count].append(each)
    for part in parts:
        part.sort(key=lambda each: not job.connections[each[0].replica].view.connected)
    return [part for part in parts if part]


def _client_context(master_key: bytes, uid: str, created: float) -> ssl.SSLContext:
    return Authority(master_key, uid, created).client_context()


def _with_call(view: AgentView, kind: str, call: Call) -> AgentView:
    changes: dict[str, Any] = {kind: call}
    return dataclasses.replace(view, **changes)


def _is_called(view: AgentView) -> bool:
    calls: Iterable[Call | None] = (getattr(view, kind) for kind in CALLS.values())
    return any(call is not None and call.done_at is None for call in calls)


def asked(waits: bool, uid: str = "", jobs: int = 1, coordinator: str = "") -> protocol.Watch:
    """Of an agent whose job has no round yet, or has one; `jobs`: that there are; `coordinator`: its address."""
    pace = max(FASTEST_SECONDS, min(SLOWEST_SECONDS, jobs / NUMBERS_A_SECOND))
    idle_beat = constants.WAITING_BEAT if waits else protocol.REPORT_SECONDS
    return protocol.Watch(uid, changes=True, pace=pace, idle_beat=idle_beat, coordinator=coordinator)


def _state(view: AgentView) -> StreamState:
    if view.connected:
        return StreamState.OPEN
    return StreamState.OPENING if view.lost_at is None else StreamState.LOST


def _result(reply: object) -> CallResult:
    if reply is None:
        return CallResult.FAILED
    return CallResult.REFUSED if isinstance(reply, protocol.Refused) else CallResult.ANSWERED


def _assigned(view: AgentView, report: protocol.Report) -> Call | None:
    """The Assign of the round that this report tells the first progress of, where this operator made it."""
    known, assign = view.report, view.assign
    if report.progress is None or assign is None or (assign.round, assign.claim) != (report.round, report.claim):
        return None
    return None if known and known.progress and known.round == report.round else assign


def _with_report(view: AgentView, report: protocol.Report, now: float) -> AgentView:
    same = view.report is not None and view.report.instance == report.instance
    ready_at = view.ready_at if same else None
    if ready_at is None and report.ready:
        ready_at = now
    return dataclasses.replace(
        view, connected=True, lost_at=None, closed=False, refusal=None, ready_at=ready_at, report=report
    )


def _matters(before: AgentView, after: AgentView) -> bool:
    """Whether more than numbers of progress have changed."""
    if before.report is None or after.report is None:
        return True
    return not (
        protocol.only_numbers(before.report, after.report)
        and before == dataclasses.replace(after, report=before.report)
    )
