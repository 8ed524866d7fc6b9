"""Calls and report streams of this operator to agents, by job and replica."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
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
from concertina.agents import authority
from concertina.agents.agent_lines import HeldLines
from concertina.agents.allowance import Allowance
from concertina.agents.bounds import LineLimits, line_limits
from concertina.agents.calls import HANDSHAKES, CallError, ConnectionIdentity, call
from concertina.agents.hearing import AgentConnectivityMonitor
from concertina.agents.relays import RELAYED_ABOVE, Coordinator, Relayable, parts, relay, relay_seconds
from concertina.agents.stall import TICK_SECONDS, StallDetector, begun, is_same_call, later
from concertina.agents.streams import Lost, StreamEnd, follow, is_idle
from concertina.plan.actions import Send
from concertina.plan.facts import constants
from concertina.plan.observed import AgentView, Call
from concertina.turns import FairLimiter
from concertina_protocol.traces import trace_id

log = logging.getLogger(__name__)
CALLS = {
    protocol.Prepare: "prepare",
    protocol.Assign: "assign",
    protocol.Release: "release",
    protocol.Drain: "drain",
    protocol.Save: "save",
}
"""Field of AgentView that contains the last call of a kind, by class of the call's message."""
OFFSET_SECONDS = 0.001
"""Change of the offset between two clocks, in seconds, up to which neither clock counts as having been set.

The clocks are read one after the other, so their offset varies by this much.
"""
NUMBERS_A_SECOND, FASTEST_SECONDS, SLOWEST_SECONDS = 100.0, 0.25, 10.0
"""Limits on how often agents report changes of progress numbers only.

The constants are the number of such reports per second from all jobs together, and the shortest and longest interval in
seconds for one job. If a coordinator (the agent of rank 0) fails, the steps since its last report are unknown (decision
"Progress numbers are sent at a limited rate").
"""
RETRY_SECONDS = 0.5
"""Shortest time in seconds before a failed call is sent again."""
TOGETHER_SECONDS = 0.02
"""Seconds for which changes of agents' states are collected before a planning pass, while calls are in progress.

After the last answer, the planning pass is requested at once (decision "Calls to agents use the open report stream").
"""


class CallResult(enum.StrEnum):
    """Result of a call to an agent, as a metric label."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"


class StreamState(enum.StrEnum):
    """State of a report stream, as a metric label."""

    OPENING = "opening"
    OPEN = "open"
    LOST = "lost"
    """The stream broke and is being reopened."""


metrics.begin_at_zero(metrics.AGENT_CALLS, CALLS.values(), CallResult)
Changed = Callable[[str, bool], None]
"""Callback for a change of a job's agents, with the job's uid and whether the change is urgent.

A change of progress numbers only is not urgent.
"""


@dataclass
class AgentConnection:
    """Connection to one agent: the agent's address, its report stream, and the last known state of the agent."""

    view: AgentView = field(default_factory=AgentView)
    address: str = ""
    """Address of the agent to which the report stream is open; empty without an open stream."""
    waits: bool = False
    """True if the job had no round (no members chosen to train) yet when the report stream was opened."""
    knows_coordinator: bool = False
    """True if the first message of the report stream contained the coordinator's address."""
    stream: asyncio.Task[None] | None = None
    _last_told: tuple[AgentView, float, AgentView] | None = None
    """Arguments and result of the last call of the method `told`."""

    def told(self, offset: float) -> AgentView:
        """Return the last known state of the agent, with `offset` seconds added to all times.

        If the state and the offset are the same as at the last call, the result is the same object. Most of a job's
        agents do not change between two planning passes, so this saves time.
        """
        if (
            self._last_told is None
            or self._last_told[0] is not self.view
            or abs(self._last_told[1] - offset) > OFFSET_SECONDS
        ):
            self._last_told = (self.view, offset, later(self.view, offset))
        return self._last_told[2]


@dataclass
class _JobConnections:
    """Connections to the agents of one job, and the calls to them that are in progress."""

    identity: ConnectionIdentity
    connections: dict[str, AgentConnection] = field(default_factory=dict)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    unanswered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of calls in progress, by kind of message and claim (the operator's decision to begin a round)."""
    tell_timer: asyncio.TimerHandle | None = None
    """Timer that requests a planning pass for the collected changes; None if no changes are collected."""
    members: int = 0
    """Largest number of members that the job has had."""
    relaying: Coordinator = field(default_factory=Coordinator)
    """Agent of rank 0, which passes calls on to the other members."""

    @property
    def coordinator(self) -> str:
        """Address of the agent that reports that it is the job's coordinator (agent of rank 0); empty without one."""
        connections = self.connections.values()
        return next(
            (
                connection.address
                for connection in connections
                if connection.view.report and connection.view.report.coordinator
            ),
            "",
        )


class AgentConnections:
    """Connections of this operator to the agents of all jobs."""

    def __init__(
        self,
        changed: Changed,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create the object without connections.

        Args:
            changed: Callback for a change of a job's agents.
            clock: Monotonic clock. Changes of the system time must not affect how long an agent counts as silent.
            wall: Clock that returns Unix seconds.
            may_act: Function that returns False while another operator may be the leader. No agent is called then.
        """
        self._changed = changed
        self._clock = clock
        self._wall = wall
        self._may_act = may_act
        self._jobs: dict[str, _JobConnections] = {}
        self.hearing = AgentConnectivityMonitor()
        self._handshakes = FairLimiter(HANDSHAKES)
        self._allowances: dict[str, Allowance] = {}
        """Budget of processor time for agents' messages, by namespace."""
        self._held_lines: WeakValueDictionary[str, HeldLines] = WeakValueDictionary()
        """Memory budget for agents' long messages, by namespace. An entry exists while the namespace has a job."""
        # more threads would take the interpreter lock from the event loop
        self._deriving = ThreadPoolExecutor(1, "keys")
        self._stalls = StallDetector(clock())

    def set_gauges(self) -> None:
        """Update the metrics that count the report streams by state."""
        connections = (connection for job in self._jobs.values() for connection in job.connections.values())
        states = Counter(_state(connection.view) for connection in connections if connection.stream is not None)
        metrics.set_all(metrics.AGENT_STREAMS, {state: states[state] for state in StreamState})
        metrics.OPERATOR_ISOLATED.set(self.hearing.operator_isolated)

    def views(self, uid: str) -> Mapping[str, AgentView]:
        """Return the last known state of each agent of the job, keyed by replica. Times are in Unix seconds."""
        self._take_out_stall()
        job = self._jobs.get(uid)
        unix_offset = self._wall() - self._clock()
        return {name: connection.told(unix_offset) for name, connection in job.connections.items()} if job else {}

    async def open(self, uid: str, created: float, master_key: bytes, namespace: str = "", members: int = 1) -> None:
        """Prepare connections to a job's agents. For a new job, derive the keys in a thread, because that is slow.

        Args:
            uid: Uid of the job.
            created: Creation time of the job in Unix seconds.
            master_key: Master key from which the job's keys are derived.
            namespace: Namespace of the job.
            members: Largest number of members that the job's agents can currently report. It determines the size limits
                of their messages.
        """
        if uid not in self._jobs:
            derivation = asyncio.get_running_loop().run_in_executor(
                self._deriving, _client_context, master_key, uid, created
            )
            context = await derivation
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
        """Return the budget of processor time that all jobs of the namespace share.

        A job that is deleted and created again gets the same budget, so the time that it used before still counts.
        """
        if namespace not in self._allowances:
            used = {job.identity.namespace for job in self._jobs.values()}
            for name, allowance in list(self._allowances.items()):
                if name not in used and allowance.untouched:
                    del self._allowances[name]
            self._allowances[namespace] = Allowance(namespace=namespace)
        return self._allowances[namespace]

    def watch(self, uid: str, addresses: Mapping[str, str], waits: bool = False) -> None:
        """Open a report stream to each agent in `addresses`, and close the job's streams to all other agents.

        A stream with a call in progress is closed after the call. If the job has been deleted, nothing happens.

        The first message on a stream contains whether the job has a round, and the address of the job's coordinator
        (the agent of rank 0). When one of these values changes, this method opens new streams to the idle agents, so
        that they receive the new value (decision "New pods ask the coordinator what to import").

        Args:
            uid: Uid of the job.
            addresses: Addresses of the agents, keyed by replica.
            waits: Whether the job has no round yet (decision "Rare reports from jobs without a round").
        """
        job = self._jobs.get(uid)
        if job is None:
            return
        for replica, connection in job.connections.items():
            if connection.stream is None:
                continue
            news = not waits and (connection.waits or (not connection.knows_coordinator and bool(job.coordinator)))
            outdated = news and is_idle(connection.view.report)
            unwanted = addresses.get(replica) != connection.address
            if outdated or (unwanted and not _is_called(connection.view)):
                self._close(uid, replica, connection)
        for replica, address in addresses.items():
            connection = job.connections.setdefault(replica, AgentConnection())
            if connection.stream is None:
                connection.waits = waits
                self._open(job, replica, connection, address)

    def send(self, uid: str, sends: Iterable[Send]) -> list[Send]:
        """Start calls in the background, and return the calls that were started.

        A call is not started if the same call is in progress, has been answered or has just failed. If the job has been
        deleted, no call is started.
        """
        job = self._jobs.get(uid)
        if job is None:
            return []
        due = [(send, call) for send in sends if (call := self._begin(job, send)) is not None]
        for _, entries in itertools.groupby(due, key=lambda sent: id(sent[0].message)):
            self._start_batch(job, list(entries))
        return [send for send, _ in due]

    def _start_batch(self, job: _JobConnections, batch: list[tuple[Send, Call]]) -> None:
        """Start calls with the same message, each either directly or through an agent that passes the message on."""
        message, entries = batch[0][0].message, {send.replica: (send, call) for send, call in batch}
        if isinstance(message, Relayable) and (routes := self._routes(job, batch)):
            line, silence = protocol.encode(message).decode().rstrip("\n"), relay_seconds(len(batch))
            for address, replicas in routes:
                part = [entries.pop(replica) for replica in replicas]
                self._start(job, self._relay(job, address, message, line, part, silence))
        for entry in entries.values():
            self._start(job, self._call(job, *entry))

    def _routes(self, job: _JobConnections, batch: list[tuple[Send, Call]]) -> list[tuple[str, list[str]]]:
        """Return the address of each agent that passes a message on, with the replicas to which the message goes.

        The operator calls all other replicas directly.
        """
        addresses = {send.replica: send.address for send, _ in batch}
        if len(batch) > RELAYED_ABOVE:
            split = parts(list(addresses), lambda replica: job.connections[replica].view.connected)
            return [(addresses[part[0]], part) for part in split]
        streams = {name for name, connection in job.connections.items() if connection.address in job.identity.streams}
        behind = [replica for replica in addresses if job.relaying.passes_on(replica, streams)]
        return [(job.connections[job.relaying.replica].address, behind)] if behind else []

    def _start(self, job: _JobConnections, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        job.calls.add(task)
        task.add_done_callback(job.calls.discard)

    def _begin(self, job: _JobConnections, send: Send) -> Call | None:
        """Record the start of a call to an agent, and return the call.

        The result is None if the call must not be started: the same call is in progress, has been answered, or failed
        less than RETRY_SECONDS ago.
        """
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
        """Drop the connections to the job's agents, except to the agents of `replicas`.

        The pods of the other agents are gone.
        """
        job = self._jobs.get(uid)
        for replica in list(job.connections) if job else ():
            assert job is not None
            if replica not in replicas:
                self._close(uid, replica, job.connections.pop(replica))

    def forget(self, uid: str) -> None:
        """Close all connections to the job's agents, cancel its calls, and remove the job."""
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
        """Check periodically whether this process was paused, and exclude the pauses from the silence of agents.

        The coroutine runs until it is cancelled.
        """
        self._stalls = StallDetector(self._clock())
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._take_out_stall()

    def _take_out_stall(self) -> None:
        seconds = self._stalls.seconds(self._clock())
        if not seconds:
            return
        log.warning("this operator did not run for %.1f s", seconds)
        metrics.STALL_SECONDS.inc(seconds)
        for job in self._jobs.values():
            for connection in job.connections.values():
                # Move all times of the view, as if the stall had not happened.
                connection.view = later(connection.view, seconds)

    async def _call(self, job: _JobConnections, send: Send, under_way: Call) -> None:
        waits = functools.partial(self._on_waits, job, [(send, under_way)])
        try:
            self._end(job, send, under_way, reply=await call(job.identity, send.address, send.message, waits))
        except CallError as error:
            self._end(job, send, under_way, error=str(error))

    async def _relay(
        self,
        job: _JobConnections,
        address: str,
        message: Relayable,
        line: str,
        part: list[tuple[Send, Call]],
        silence: float,
    ) -> None:
        """Ask the agent at `address` to pass a message on to the replicas of `part`, and record their answers.

        If no answer of a replica arrives, the operator calls that replica directly. The replica counts as silent only
        if the direct call fails too, because the agent at `address` may not have passed the message on.
        """
        waiting = {send.replica: (send, under_way) for send, under_way in part}
        addresses = {send.replica: send.address for send, _ in part}
        own = [entry for entry in part if entry[0].address == address]
        for send, under_way in part:
            if send.address != address:
                self._change(job, send, under_way, sent_at=None)
        waits = functools.partial(self._on_waits, job, own)
        answers = relay(job.identity, address, message, line, addresses, silence, waits)
        async with contextlib.aclosing(answers):
            async for replica, reply in answers:
                send, under_way = waiting.pop(replica)
                if reply is None:
                    self._start(job, self._call_now(job, send, under_way))
                else:
                    self._end(job, send, under_way, reply=reply, sent_at=under_way.sent_at)
        for entry in waiting.values():
            self._start(job, self._call_now(job, *entry))

    async def _call_now(self, job: _JobConnections, send: Send, under_way: Call) -> None:
        """Call a replica directly, because another agent has not passed the call on.

        The time for which the replica counts as silent begins now.
        """
        self._change(job, send, under_way, sent_at=self._clock())
        await self._call(job, send, under_way)

    def _on_waits(self, job: _JobConnections, part: list[tuple[Send, Call]], turn: bool) -> None:
        """Record that the calls in `part` wait for their TLS handshakes (`turn` is true), or no longer wait.

        The operator limits the number of handshakes at a time. While a call waits, its agent does not count as silent.
        """
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
        """Request a planning pass for a job, because the state of its agents has changed.

        If `at_once` is false, the request is delayed for TOGETHER_SECONDS, so that several changes cause one planning
        pass.
        """
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
        """Update the recorded call to a replica with `changes`, and return whether the call is still recorded.

        The record is dropped when the replica's pod is gone, or when a later call of the same kind is sent.
        """
        kind = CALLS[type(send.message)]
        connection = job.connections.get(send.replica)
        viewed: Call | None = getattr(connection.view, kind) if connection else None
        if connection is None or viewed is None or not is_same_call(viewed, under_way):
            return False
        connection.view = _with_call(connection.view, kind, dataclasses.replace(viewed, **changes))
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
            job.relaying = job.relaying.after(report)
            if connection.view != before:
                self.hearing.update(uid, replica, connection.view)
                if _matters(before, connection.view) and not (connection.waits and _only_starts(before.report, report)):
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
        connection.stream = asyncio.create_task(
            follow(job.identity, address, ask, on_waits, on_report, on_lost),
            name=f"watch {replica}",
        )

    def _close(self, uid: str, replica: str, connection: AgentConnection) -> None:
        if connection.stream is not None:
            connection.stream.cancel()
            metrics.AGENT_STREAM_ENDS.labels(StreamEnd.NOT_WANTED).inc()
        connection.stream, connection.address = None, ""
        # What the stream showed may no longer hold, and nothing updates it.
        connection.view = dataclasses.replace(
            connection.view, connected=False, wanted_at=None, lost_at=None, queued_at=None, closed=False, refusal=None
        )
        self.hearing.update(uid, replica, connection.view)


def _client_context(master_key: bytes, uid: str, created: float) -> ssl.SSLContext:
    return authority.of_job(master_key, uid, created).client_context()


def _with_call(view: AgentView, kind: str, call: Call) -> AgentView:
    changes: dict[str, Any] = {kind: call}
    return dataclasses.replace(view, **changes)


def _is_called(view: AgentView) -> bool:
    calls: Iterable[Call | None] = (getattr(view, kind) for kind in CALLS.values())
    return any(call is not None and call.done_at is None for call in calls)


def asked(waits: bool, uid: str = "", jobs: int = 1, coordinator: str = "") -> protocol.Watch:
    """Return the Watch message, with which the operator requests reports from an agent.

    Args:
        waits: Whether the job has no round (no members chosen to train) yet. Idle agents then report less often.
        uid: Uid of the job.
        jobs: Number of jobs of this operator. With more jobs, agents report their progress less often.
        coordinator: Address of the job's coordinator (the agent of rank 0); empty if unknown.
    """
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
    """Return the Assign call that gave an agent its rank, if `report` is the first progress report since the call.

    Otherwise the result is None. The time from the call to the report is recorded in a metric.
    """
    last_report, assign = view.report, view.assign
    if report.progress is None or assign is None or (assign.round, assign.claim) != (report.round, report.claim):
        return None
    return None if last_report and last_report.progress and last_report.round == report.round else assign


def _with_report(view: AgentView, report: protocol.Report, now: float) -> AgentView:
    is_same_instance = view.report is not None and view.report.instance == report.instance
    ready_at = view.ready_at if is_same_instance else None
    if ready_at is None and report.ready:
        ready_at = now
    return dataclasses.replace(
        view, connected=True, lost_at=None, closed=False, refusal=None, ready_at=ready_at, report=report
    )


def _only_starts(before: protocol.Report | None, report: protocol.Report) -> bool:
    """Return whether `report`, and the report before it if there is one, say only that the agent is starting.

    Such a report needs no planning pass before a job's first round, because the replica is not ready.
    """
    starting = protocol.Report(
        report.replica, report.instance, ready=False, round=0, claim="", state=protocol.State.IDLE, takes_calls=True
    )
    reports = (report,) if before is None else (before, report)
    return all(dataclasses.replace(each, storage=None) == starting for each in reports)


def _matters(before: AgentView, after: AgentView) -> bool:
    """Return whether two states of an agent differ in more than training progress, so that a plan is needed soon."""
    if before.report is None or after.report is None:
        return True
    return not (
        protocol.only_numbers(before.report, after.report)
        and before == dataclasses.replace(after, report=before.report)
    )
