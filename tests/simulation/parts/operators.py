"""Operator's process: caches, streams, calls, and the pass (observe, plan, apply), which may be interrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import concertina_protocol as p
from concertina.agents.connections import asked
from concertina.agents.relays import Coordinator, Relayable, relay_seconds
from concertina.agents.stall import TICK_SECONDS, StallDetector, is_same_call, later
from concertina.agents.streams import is_idle, silence
from concertina.controller.cache.taken_back import TakenBack
from concertina.controller.silence_limit import SilenceLimit
from concertina.kube.errors import Forbidden, Invalid, WebhookFailed
from concertina.kube.parse.refusals import refusal
from concertina.plan.actions import Action, CreatePod, DeletePod, Plan, Send
from concertina.plan.observed import (
    AgentView,
    Call,
    ConnectionRefusal,
    CreateRefusal,
    JobObservation,
    JobView,
    NodeView,
    PodView,
    QueuePlace,
)
from concertina.plan.plan import plan
from simulation.parts.clock import START, Violation, changed
from simulation.parts.cluster import Conflict, JobVersion

if TYPE_CHECKING:
    from simulation.parts.agents import AgentProcess
    from simulation.runs.world import World

CALL_TIMEOUT = 3.0
Answer = PodView | Conflict | Forbidden | Invalid | WebhookFailed | None
"""Answer of the API server to a write of a pod."""


@dataclasses.dataclass
class Contact:
    """Contact of this operator with one replica's agent."""

    view: AgentView = dataclasses.field(default_factory=AgentView)
    """View of the agent; its times are by the operator's monotonic clock."""
    process: AgentProcess | None = None
    """Process at the other end of the open stream."""
    wanted: bool = False
    waits: bool = False
    """Whether the job had no round yet when the stream was opened."""
    opening: bool = False
    silent_since: float = 0.0
    relayed: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Functions to call when the open stream ends, one for each call that this agent was to pass on."""


class OperatorProcess:
    def __init__(self, world: World, name: str, key: str = "") -> None:
        """Initialize the process; `key` is the id of its master key, or empty if keys are not simulated."""
        self.world, self.clock, self.name, self.key = world, world.clock, name, key
        self.taken_back = TakenBack()
        self.alive, self.busy, self.again = True, False, False
        cluster = world.cluster
        self.version, self.status, self.spec, self.generation, self.held_by = cluster.job
        self.pods: dict[str, PodView] = dict(cluster.pods)
        self.nodes: dict[str, NodeView] = dict(cluster.nodes)
        self.contacts: dict[str, Contact] = {}
        self.stalls = StallDetector(self.clock.now)
        self.writes: list[Action] = []
        """Writes outside the passes that are under way."""
        self.told: set[str] = set()
        """Uids of pods that the watch has reported."""
        self.started_again: dict[str, float] = {}
        """Time at which the restart of a pod's container was observed, by the pod's uid."""
        self.numbers = -1
        """Version of the job that this operator's last write of mere numbers has made."""
        self.silence_limit = SilenceLimit(lambda: self.clock.now)
        self.given_up: frozenset[str] = frozenset()
        """Uids of pods whose silence counts as death."""
        self.secret_made = False
        self.refused: CreateRefusal | None = None
        self.heard_at = self.clock.now
        """Time at which an agent was last in contact: its stream was opened, or had a line."""
        self.relaying = Coordinator()
        self.passed_on = 0
        """Number of calls that a coordinator was asked to pass on."""
        self._arrives = 0.0
        self._recheck = 0
        self.passes = 0
        cluster.listeners.append(self._changed)
        self._tick()
        self.trigger()

    @property
    def ahead(self) -> float:
        """Seconds by which the operator's wall clock is ahead."""
        return self.world.clock_of(self.name)

    @property
    def now(self) -> float:
        """Time of the operator's wall clock, which may be set.

        Waiting for agents is measured by the monotonic clock.
        """
        return self.clock.now + self.ahead

    def kill(self) -> None:
        self.world.tell(f"{self.name} dies")
        self.alive = False
        self.world.cluster.listeners.remove(self._changed)
        for contact in self.contacts.values():
            if contact.process is not None:
                contact.process.watchers.pop(self, None)

    def kill_if_alive(self) -> None:
        if self.alive:
            self.kill()

    # --- the caches: late, in order

    def _changed(self, what: str) -> None:
        lag = self.world.network.delay() * (20 if self.world.network.unruly and self.clock.chance(0.05) else 1)
        cluster, (kind, _, name) = self.world.cluster, what.partition("/")
        self._arrives = max(self._arrives + 1e-6, self.clock.now + lag + cluster.slowness())
        value = cluster.job if kind == "job" else cluster.pods.get(name) if kind == "pod" else cluster.nodes[name]
        self.clock.after(self._arrives - self.clock.now, self._arrived, kind, name, value)

    def _arrived(self, kind: str, name: str, value: object) -> None:
        if not self.alive:
            return
        if kind == "job":
            assert isinstance(value, JobVersion)
            self._take(value)
            if value.number == self.numbers:
                return
        elif kind == "node":
            self.nodes[name] = value  # type: ignore[assignment]
        elif value is None:
            self.pods.pop(name, None)
            self._forget(name)
        else:
            assert isinstance(value, PodView)
            before, self.pods[name] = self.pods.get(name), value
            if before is not None and before.uid == value.uid and value.restarts > before.restarts:
                self.started_again[value.uid] = self.clock.now
            self.told.add(value.uid)  # type: ignore[attr-defined]
        self.trigger()

    def _take(self, job: JobVersion) -> None:
        """Take an object if it is newer: the answer to a write may arrive before events that were on their way."""
        if job.number >= self.version:
            self.version, self.status, self.spec, self.generation, self.held_by = job

    def _forget(self, name: str) -> None:
        contact = self.contacts.pop(name, None)
        if contact is not None:
            contact.wanted = False
            if contact.process is not None:
                contact.process.watchers.pop(self, None)

    # --- the pass

    def trigger(self) -> None:
        if not self.alive:
            return
        self.again = True
        if not self.busy:
            self.busy = True
            self.clock.after(0.001, self._pass)

    def _pass(self) -> None:
        if not self.alive:
            return
        self.again = False
        self.passes += 1
        if left := self._left_to_another():
            self._done(left)
            return
        observed = self._observed()
        made = self._plan(observed)
        if made.only_numbers:
            self._decides_the_same(observed, made)
        self.world.invariants.committing(observed, made.status)
        if made.status is observed.job.status or made.status == observed.job.status:
            self._apply(made, list(made.actions))
        else:
            lag = self.clock.between(0.002, 0.01) + self.world.cluster.slowness()
            self.clock.after(lag, self._write, observed, made)

    @property
    def lacks_key(self) -> bool:
        """Return whether the job's agents refuse this operator because of its key."""
        return self.status.master_key not in ("", self.key)

    def _left_to_another(self) -> float:
        """Return whether the operator leaves the job to another one, as `Reconciler` does.

        It does so for a job whose key it lacks, while another operator writes to the job.
        """
        return self.taken_back.yield_seconds_left(self.status.manifest(), self.clock.now) if self.lacks_key else 0.0

    def _acts(self, action: Action) -> None:
        if self.lacks_key:
            raise Violation(f"{self.name} acts on a job whose key it does not have: {action}")

    def _plan(self, observed: JobObservation) -> Plan:
        try:
            return plan(observed, self.now)
        except Exception as error:
            if self.world.invariants.lies:
                raise Violation(f"plan() raises over what an agent says: {error!r}") from error
            raise

    def _take_out_stall(self) -> None:
        if seconds := self.stalls.seconds(self.clock.now):
            for contact in self.contacts.values():
                contact.view = later(contact.view, seconds)

    def _observed(self) -> JobObservation:
        self._take_out_stall()
        self.world.claims += 1
        rivalry = self.world.rivalry
        place = rivalry.place(self) if rivalry else QueuePlace()
        return JobObservation(
            job=self.job_view,
            pods=tuple(sorted(self.pods.values(), key=lambda pod: pod.order)),
            nodes=self.nodes,
            agents={name: self._view(contact) for name, contact in self.contacts.items() if name in self.pods},
            fresh_claim=f"claim-{self.world.claims}",
            seen_for={pod.uid: self.clock.now - pod.created for pod in self.pods.values()},
            started_again_for={uid: self.clock.now - at for uid, at in self.started_again.items()},
            secret_made=self.secret_made,
            master_keys=(self.key,) if self.key else (),
            given_up=self.given_up,
            refused=self.refused,
            place=place,
        )

    def _view(self, contact: Contact) -> AgentView:
        """Return the view of an agent with times of the wall clock, as `AgentConnections.views` does."""
        return later(contact.view, self.ahead) if self.ahead else contact.view

    @property
    def job_view(self) -> JobView:
        world = self.world
        number = world.rivalry.worlds.index(world) if world.rivalry else 0
        namespace, created = f"team-{number % 2}", START + number
        return JobView(
            world.name,
            namespace,
            world.uid,
            self.generation,
            created,
            deleting=bool(self.held_by),
            spec=self.spec,
            spec_error="",
            status=self.status,
            finalizers=self.held_by,
        )

    def _write(self, observed: JobObservation, made: Plan) -> None:
        if not self.alive:
            return
        cluster = self.world.cluster
        try:
            cluster.write_status(self.name, observed.job.status, made.status)
        except Conflict:
            self.clock.after(0.2 + cluster.slowness(), self._done, 0.0)
            return
        if cluster.answers_too_late():
            self.clock.after(CALL_TIMEOUT, self._done, 0.0)
        elif lag := cluster.slowness():
            self.clock.after(lag, self._written, observed, made, cluster.job)
        else:
            self._written(observed, made, cluster.job)

    def _written(self, observed: JobObservation, made: Plan, job: JobVersion) -> None:
        """Handle the API server's answer to a status write."""
        if not self.alive:
            return
        if self.lacks_key:
            stored = job.status.manifest()
            self.taken_back.written(stored, stored, restores=False, now=self.clock.now)
        self._tell(observed, made)
        self._take(job)
        if made.only_numbers:
            self.numbers = job.number
        if self.world.crashes_operator(self):
            return
        self.clock.after(self.clock.between(0.002, 0.01), self._apply, made, list(made.actions))

    def _decides_the_same(self, observed: JobObservation, made: Plan) -> None:
        """Check that a new version of the job needs no pass if only numbers in its status have changed.

        Raises:
            Violation: If a pass would decide something.
        """
        job = dataclasses.replace(observed.job, status=made.status)
        again = self._plan(dataclasses.replace(observed, job=job))
        if (again.status, again.actions, again.watch) != (made.status, made.actions, made.watch) or again.events:
            raise Violation(f"numbers alone decide: {again} after {made}")

    def _tell(self, observed: JobObservation, made: Plan) -> None:
        for event in made.events:
            self.world.tell(f"{self.name}: {event.reason}: {event.message}")

    def _apply(self, made: Plan, actions: list[Action]) -> None:
        """Apply the plan action by action; the process may die between any two of them.

        Writes outside the passes continue.
        """
        for action in actions:
            if not self.alive or self.world.crashes_operator(self):
                return
            if isinstance(action, Send):
                self._send(action)
        if not self.alive:
            return
        self._follow(dict(made.watch), not made.status.world.round)
        at = 0.0
        for action in actions:
            if not isinstance(action, Send) and action not in self.writes:
                self.writes.append(action)
                at += self.clock.between(0.002, 0.008)
                self.clock.after(at + self.world.cluster.slowness(), self._change, action)
        self._done(self._give_up_silent(made))

    def _give_up_silent(self, made: Plan) -> float | None:
        """Treat silent pods as dead as the shell does, and return the seconds until the next pass."""
        self.given_up &= frozenset(made.silent)
        waiting = [uid for uid in made.silent if uid not in self.given_up]
        if not waiting:
            return made.recheck_after
        seconds = self.silence_limit.ask(self.job_view.namespace)
        if not seconds:
            self.given_up |= {waiting[0]}
        return min(seconds, made.recheck_after or seconds)

    def _change(self, action: Action) -> None:
        self._acts(action)
        if not self.alive or self.world.crashes_operator(self):
            self.writes.remove(action)
            return
        answer: Answer = None
        try:
            answer = self._write_pod(action)
        except (Conflict, Forbidden, Invalid, WebhookFailed) as error:
            answer = error
        if self.world.cluster.answers_too_late():
            answer = Conflict("no answer in time")
        if lag := self.world.cluster.slowness():
            self.clock.after(lag, self._changed_pod, action, answer)
        else:
            self._changed_pod(action, answer)

    def _write_pod(self, action: Action) -> PodView | None:
        if isinstance(action, CreatePod):
            return self.world.cluster.create(self.name, action)
        if isinstance(action, DeletePod):
            self.world.cluster.delete(self.name, action)
        else:
            self.secret_made = True
        return None

    def _changed_pod(self, action: Action, answer: Answer) -> None:
        """Handle the API server's answer to a write of a pod."""
        self.writes.remove(action)
        if not self.alive:
            return
        if isinstance(answer, Conflict):
            self.clock.after(1.0, self.trigger)
        elif isinstance(answer, Forbidden | Invalid | WebhookFailed):
            kind, before = refusal(answer), self.refused
            since = before.since if before and before.kind is kind else self.now
            self.refused = CreateRefusal(kind, answer.message, since, self.now)
        elif isinstance(answer, PodView):
            if answer.uid not in self.told:  # The shell's reflector remembers its own writes, too.
                self.pods.setdefault(answer.name, answer)
            self.refused = None

    def _done(self, recheck: float | None) -> None:
        self.busy = False
        if self.again:
            self.trigger()
        elif recheck is not None:
            self._recheck += 1
            self.clock.after(max(0.001, recheck), self._rechecked, self._recheck)

    def _rechecked(self, number: int) -> None:
        if number == self._recheck:
            self.trigger()

    # --- calls

    def _send(self, action: Send) -> None:
        self._acts(action)
        message, contact = action.message, self.contacts.setdefault(action.replica, Contact())
        kind = type(message).__name__.lower()
        old: Call | None = getattr(contact.view, kind)
        call = Call.of(message, self.clock.now)
        if old and not old.error and old.covers(call):
            return
        contact.view = changed(contact.view, **{kind: call})
        streams = {name for name, other in self.contacts.items() if other.process is not None}
        if isinstance(message, Relayable) and self.relaying.passes_on(action.replica, streams):
            self._send_through(self.contacts[self.relaying.replica], action, (contact, kind, call))
        else:
            self._call(action, (contact, kind, call))

    def _send_through(self, stream: Contact, action: Send, heard: tuple[Contact, str, Call]) -> None:
        """Have the coordinator pass a call on, and make the call if it does not bring the answer."""
        contact, kind, call = heard
        coordinator, network, waits = stream.process, self.world.network, True
        assert coordinator is not None
        contact.view = changed(contact.view, **{kind: changed(call, sent_at=None)})
        self.passed_on += 1

        def ask_itself() -> None:
            nonlocal waits
            if waits and self.alive and is_same_call(getattr(contact.view, kind), call):
                waits = False
                contact.view = changed(contact.view, **{kind: changed(call, sent_at=self.clock.now)})
                self._call(action, heard)

        def arrives(reply: p.Message | None) -> None:
            nonlocal waits
            if not waits or stream.process is not coordinator:
                return
            if reply is None:
                ask_itself()
            else:
                waits = False
                self._answered(*heard, reply, "")

        def passes_back(reply: p.Message | None) -> None:
            if network.talk(self.name, coordinator.host):
                self.clock.after(network.delay(), arrives, reply)

        stream.relayed.append(ask_itself)
        if network.talk(self.name, coordinator.host):
            self.clock.after(network.delay(), coordinator.pass_on, action.message, action.replica, passes_back)
            if network.doubles():
                late = self.clock.between(0.01, 10.0)
                self.clock.after(late, coordinator.pass_on, action.message, action.replica, passes_back)
        self.clock.after(relay_seconds(len(self.contacts)), ask_itself)

    def _call(self, action: Send, heard: tuple[Contact, str, Call]) -> None:
        message, network, pod = action.message, self.world.network, self.pods.get(action.replica)
        process = self.world.agents.get(action.replica)
        if pod is None or not network.reaches(self.name, pod.node):
            self.clock.after(CALL_TIMEOUT, self._answered, *heard, None, "timed out")
        elif process is None or not process.alive:
            self.clock.after(0.002, self._answered, *heard, None, "connection refused")
        elif network.loses():
            self.clock.after(network.delay(), self._answered, *heard, None, "connection reset")
        else:
            self._deliver(process, message, heard)
            if network.doubles():
                self.clock.after(self.clock.between(0.01, 10.0), self._deliver, process, message, None)

    def _deliver(self, process: AgentProcess, message: object, heard: tuple[Contact, str, Call] | None) -> None:
        network = self.world.network

        def answered(reply: p.Message) -> None:
            if heard is None:
                return
            if network.loses() or not network.talk(self.name, process.host):
                self.clock.after(network.delay(), self._answered, *heard, None, "connection reset before the answer")
            else:
                self.clock.after(network.delay(), self._answered, *heard, process.bounded(reply), "")

        self.clock.after(network.delay(), process.ask, message, answered)
        if heard is not None:
            self.clock.after(CALL_TIMEOUT, self._answered, *heard, None, "timed out")

    def _answered(self, contact: Contact, kind: str, call: Call, reply: p.Message | None, error: str) -> None:
        known: Call | None = getattr(contact.view, kind)
        if self.alive and is_same_call(known, call):
            assert known is not None
            self.world.invariants.answered(known, reply)
            done = changed(known, done_at=self.clock.now, reply=reply, error=error)
            contact.view = changed(contact.view, **{kind: done})
            self.trigger()

    # --- streams

    def _follow(self, watch: dict[str, str], waits: bool) -> None:
        for name, contact in self.contacts.items():
            outdated = contact.waits and not waits and is_idle(contact.view.report)
            if contact.wanted and (outdated or name not in watch):
                contact.wanted = False
                if contact.process is not None:
                    contact.process.watchers.pop(self, None)
                    contact.process = None
                    self._stream_ends(contact)
                contact.view = changed(
                    contact.view, connected=False, wanted_at=None, lost_at=None, closed=False, refusal=None
                )
        for name in watch:
            contact = self.contacts.setdefault(name, Contact())
            if not contact.wanted:
                contact.wanted, contact.waits = True, waits
                contact.view = changed(contact.view, wanted_at=self.clock.now)
                self._open(name, contact)

    def _open(self, name: str, contact: Contact) -> None:
        if not self.alive or not contact.wanted or contact.process is not None or contact.opening:
            return
        pod = self.pods.get(name)
        if pod is None:
            self.clock.after(0.5, self._open, name, contact)
        else:
            contact.opening = True
            near = self.world.network.reaches(self.name, pod.node)
            self.clock.after(self.world.network.delay() if near else CALL_TIMEOUT, self._opened, name, contact, near)

    def _opened(self, name: str, contact: Contact, near: bool) -> None:
        contact.opening = False
        if not self.alive or not contact.wanted:
            return
        process = self.world.agents.get(name)
        if near and process is not None and self.clock.stands(process):
            near, process = False, None  # The kernel accepts the connection, and no agent answers.
        if near and self.lacks_key:
            contact.view = changed(contact.view, refusal=ConnectionRefusal.OTHER_KEY)
            self.clock.after(self.clock.between(0.2, 0.5), self._open, name, contact)
        elif near and process is not None and process.alive:
            contact.process, contact.silent_since = process, 0.0
            process.watchers[self] = self.clock.now
            contact.view = changed(contact.view, connected=True, lost_at=None, closed=False, refusal=None)
            self.heard_at = self.clock.now
            process.tell_operator(self)
        else:
            if near:
                contact.view = changed(contact.view, refusal=ConnectionRefusal.NOT_LISTENING)
                self.trigger()
            self.clock.after(self.clock.between(0.2, 0.5), self._open, name, contact)

    def reported(self, process: AgentProcess, report: p.Report) -> None:
        contact = self.contacts.get(process.replica)
        if not self.alive or contact is None or contact.process is not process:
            return
        if not self.world.network.carries(process.host, self.name):
            self.clock.after(0.5, self.reported, process, process.report())
            return
        ready_at = contact.view.ready_at
        if not report.ready or contact.view.report is None or contact.view.report.instance != report.instance:
            ready_at = None
        if ready_at is None and report.ready:
            ready_at = self.clock.now
        self.heard_at = self.clock.now
        self.relaying = self.relaying.after(report)
        contact.view = changed(contact.view, report=report, ready_at=ready_at)
        self.trigger()

    def stream_ended(self, process: AgentProcess) -> None:
        contact = self.contacts.get(process.replica)
        if self.alive and contact is not None and contact.process is process:
            self._lost(process.replica, contact, closed=True)

    def _lost(self, name: str, contact: Contact, closed: bool) -> None:
        if contact.process is not None:
            contact.process.watchers.pop(self, None)
        contact.process = None
        self._stream_ends(contact)
        contact.view = changed(contact.view, connected=False, lost_at=self.clock.now, closed=closed)
        self._open(name, contact)
        self.trigger()

    def _stream_ends(self, contact: Contact) -> None:
        """Make the calls that the agent at the other end was to pass on."""
        relayed, contact.relayed = contact.relayed, []
        for ask_itself in relayed:
            ask_itself()

    def _tick(self) -> None:
        """Close streams on which no heartbeat arrives, because the other end can't be reached."""
        if not self.alive:
            return
        self._take_out_stall()
        for name, contact in list(self.contacts.items()):
            if contact.process is None:
                continue
            process = contact.process
            near = self.world.network.carries(process.host, self.name) and not self.clock.stands(process)
            if near and process.alive:
                contact.silent_since, self.heard_at = 0.0, self.clock.now
            elif not contact.silent_since:
                contact.silent_since = self.clock.now
            elif self.clock.now - contact.silent_since >= silence(asked(contact.waits), contact.view.report):
                self._lost(name, contact, closed=False)
        self.clock.after(TICK_SECONDS, self._tick)
