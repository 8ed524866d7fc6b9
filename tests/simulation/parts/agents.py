"""One agent's process: the real core, and a shell that carries out its effects on the simulated world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import concertina_protocol as p
from concertina.agents import bounds
from concertina_agent.agent import FAREWELL_SECONDS
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_protocol import worker_channel as w
from simulation.parts.clock import Violation
from simulation.parts.collective import Collective
from simulation.parts.lineage import Lineage

if TYPE_CHECKING:
    from simulation.parts.cluster import SimPod
    from simulation.parts.operators import OperatorProcess
    from simulation.runs.world import World

M = TypeVar("M")
TICK = 0.5
RECONNECT_SECONDS = 0.5
"""Seconds after which a broken stream counts as a loss (`concertina_agent.net.link`)."""


class AgentProcess:
    def __init__(self, world: World, pod: SimPod) -> None:
        self.world, self.clock, self.pod = world, world.clock, pod
        self.replica, self.host = pod.name, pod.node
        pod.starts += 1
        self.instance = f"{pod.name}#{pod.uid}#{pod.starts}"
        self.core = AgentState(
            self.replica,
            world.uid,
            self.instance,
            world.workers,
            bundled=True,
            storage=p.Storage("Unknown"),
            seen=pod.seen,
            held=pod.held(),
        )
        self.alive, self._goes = True, False
        self._booted = self.clock.between(0.0, 100_000.0)
        """Start of the process's monotonic clock, which begins at 0."""
        self.lie: Callable[[p.Report], p.Report] | None = None
        """Function that falsifies the agent's reports, if the agent lies."""
        self.collective: Collective | None = None
        self.ranks: tuple[int, ...] = ()
        self.inside: Collective | None = None
        """Round that the workers have been told to leave, until they are out of it."""
        self.out_at = 0.0
        """Time at which the workers are out of that round."""
        self.live: Lineage | None = None
        """Weights that surviving workers still have. A round must not continue from them."""
        self.watchers: dict[OperatorProcess, float] = {}
        """Arrival time of the last line, for each stream to an operator."""
        self._members: dict[str, AgentProcess] = {}
        """Members that have joined, on a coordinator. Their `_coordinator` is this process."""
        self._coordinator: AgentProcess | None = None
        self._undone: list[p.Undone] = []
        """States that LATEST has to declare undone before anything is published. They outlast the round, not the
        process."""
        self._requests: dict[int, Callable[[p.Message], None]] = {}
        self._count = 0
        self.clock.after(world.warm_up(), self.handle, e.Warm())
        self.clock.after(self.clock.between(0.02, 0.3), self._probe)
        self.clock.after(self.clock.between(0, TICK), self._tick)

    @property
    def ahead(self) -> float:
        """Seconds by which the agent's wall clock is ahead."""
        return self.world.clock_of(self.host)

    @property
    def follows(self) -> bool:
        """Whether the agent has a stream to its coordinator."""
        return self.alive and self._coordinator is not None

    # --- events in, effects out

    def handle(self, event: e.Event) -> None:
        if not self.alive:
            return
        if self.clock.stands(self):
            self.clock.after(0.0, self.handle, event)
            return
        for effect in machine.step(self.core, event, self.clock.now - self._booted, self.clock.now + self.ahead):
            if self.alive:
                EFFECTS[type(effect)](self, effect)

    def ask(self, message: Any, answered: Callable[[p.Message], None]) -> None:
        """Handle a request that has arrived."""
        if not self.alive:
            return
        if self.clock.stands(self):
            self.clock.after(0.0, self.ask, message, answered)
            return
        self._count += 1
        self._requests[self._count] = answered
        self.handle(e.RequestReceived(self._count, message))

    def pass_on(self, message: Any, replica: str, passes_back: Callable[[p.Message | None], None]) -> None:
        """Pass a message of the operator on to another agent, and its answer back.

        The answer is None if nothing listens where the other agent should be. Silence is not answered.
        """
        if not self.alive:
            return
        if self.clock.stands(self):
            self.clock.after(0.0, self.pass_on, message, replica, passes_back)
            return
        if self.world.dies_passing_on():
            self.world.tell(f"{self.replica} dies before it passes a {type(message).__name__} on to {replica}")
            self.die()
            self.world.cluster.process_ended(self.pod, 137)
            return
        network, other = self.world.network, self.world.agents.get(replica)

        def answered(reply: p.Message) -> None:
            if network.talk(self.host, asked.host):
                self.clock.after(network.delay(), back, reply)

        def back(reply: p.Message | None) -> None:
            if self.alive and self.clock.stands(self):
                self.clock.after(0.0, back, reply)
            elif self.alive:
                passes_back(None if reply is None else asked.bounded(reply))

        pod = self.world.cluster.pods.get(replica)
        if pod is None or not network.reaches(self.host, pod.node):
            return
        if other is None or not other.alive:
            self.clock.after(0.002, back, None)
            return
        asked = other
        self.clock.after(network.delay(), asked.ask, message, answered)

    def _reply(self, effect: e.Reply) -> None:
        self.world.invariants.answering(self, effect.message)
        if answered := self._requests.pop(effect.request, None):
            answered(effect.message)

    def _stray(self, effect: e.IllegalTransition) -> None:
        raise Violation(f"{self.replica}: {effect.what}")

    def _tick(self) -> None:
        if not self.alive:
            return
        self.handle(self._seen_of_workers())
        self._beat()
        self.clock.after(TICK, self._tick)

    def _seen_of_workers(self) -> e.Tick:
        run = self.collective
        return e.Tick() if run is None else e.Tick(run.heartbeats(self), run.stopped_ranks(self))

    def _beat(self) -> None:
        if self._members:
            state = self.core.beat()
            for member in self._members.values():
                self._say(member, e.CoordinatorMessage(state.round, state.claim, state), 0.002)
        if self._coordinator is not None:
            self._say(self._coordinator, e.MemberMessage(self.core.member_state()), 0.002)

    def hears(self, other: AgentProcess) -> bool:
        """Return whether the other agent answers a call of this one."""
        near = self.world.network.reaches(self.host, other.host)
        return near and other.alive and not self.clock.stands(other)

    def _say(self, other: AgentProcess, event: e.Event, delay: float) -> None:
        """Send a line on a stream between agents.

        The line is delayed while the agents can't reach each other, and then lost with the stream.
        """
        if self.world.network.carries(self.host, other.host):
            self.clock.after(delay, other.handle, event)

    # --- effects

    def _persist(self, effect: e.PersistSeen) -> None:
        self.world.invariants.seen(self, effect.round, effect.claim)
        self.pod.seen = (effect.round, effect.claim)

    def _kill(self, effect: e.KillWorkers) -> None:
        run, late = self.collective, self.world.starved.get(self.host, 0.0)
        if run is not None:
            self.inside, self.out_at = run, self.clock.now
            late += self.world.survivors.leave(self, run, effect.round)
        self._end_round()
        # A second Prepare does not hurry workers that are on their way out.
        self.out_at = max(self.out_at, self.clock.now + self.clock.between(0.002, 0.03) + late)
        self.clock.after(self.out_at - self.clock.now, self._gone, effect.round, self.out_at)

    def _gone(self, round: int, out_at: float) -> None:
        if out_at == self.out_at:
            self.inside = None
            self.pod.unfinished.clear()
        self.handle(e.WorkersGone(round, self.pod.held()))

    def _end_round(self) -> None:
        collective, self.collective = self.collective, None
        if collective is not None:
            collective.leave(self)
        self._unlink()

    def _unlink(self) -> None:
        """Close the streams to coordinator and members. The other ends notice that if they can be reached."""
        for name, member in list(self._members.items()):
            if member._coordinator is self:
                member._coordinator = None
                seen = self._round_of(member)
                self._say(member, e.CoordinatorGone(*seen, "closed the connection"), 0.005)
            del self._members[name]
        if self._coordinator is not None:
            coordinator, self._coordinator = self._coordinator, None
            if coordinator._members.pop(self.replica, None) is not None:
                self._say(
                    coordinator,
                    e.MemberGone(*self._round_of(coordinator), self.replica, "closed its connection"),
                    0.005,
                )

    @staticmethod
    def _round_of(process: AgentProcess) -> tuple[int, str]:
        return process.core.seen

    def _bind(self, effect: e.BindStore) -> None:
        self.clock.after(0.001, self.handle, e.StoreBound(effect.round, effect.claim, f"{self.replica}:store"))

    def _reach_out(self, effect: e.PingPeers) -> None:
        self.clock.after(self.clock.between(0.002, 0.02), self._reached, effect.prepare)

    def _reached(self, prepare: p.Prepare) -> None:
        names = []
        for candidate in prepare.candidates:
            other = self.world.agents.get(candidate.replica)
            if other and self.hears(other):
                names.append(candidate.replica)
        late = 0.3 if len(names) < len(prepare.candidates) else 0.0
        self.clock.after(late, self.handle, e.Reached(prepare, tuple(names)))

    def _start(self, effect: e.StartRound) -> None:
        assign = effect.assign
        self.world.invariants.starting(self, assign)
        self.collective = self.world.collective(assign)
        mine = assign.members[effect.me]
        self.ranks = tuple(range(mine.first_rank, mine.first_rank + mine.workers))
        self.collective.start(self)
        if not effect.coordinator:
            self._join(assign, assign.members[0])

    def _join(self, assign: p.Assign, coordinator: p.Member) -> None:
        if (
            not self.alive
            or self.collective is None
            or self.collective.assign is not assign
            or self._coordinator is not None
        ):
            return
        self.clock.after(0.25, self._join, assign, coordinator)
        other = self.world.agents.get(coordinator.replica)
        if other is None or not self.hears(other):
            return
        join = p.Join(self.world.uid, assign.round, assign.claim, self.replica, self.instance)

        def answered(reply: p.Message) -> None:
            if isinstance(reply, p.Accepted) and self.alive and self.collective and self.collective.assign is assign:
                self._coordinator, other._members[self.replica] = other, self
                self.handle(e.CoordinatorJoined(assign.round, assign.claim))
                self._say(other, e.MemberMessage(self.core.member_state()), 0.002)

        other.ask(join, answered)

    def reset_stream(self) -> None:
        """Reset the stream to the coordinator, as a device on the way might.

        Neither side has died, so the member joins again. If that takes too long, each side takes the other for lost.
        """
        coordinator, run = self._coordinator, self.collective
        if coordinator is None or run is None:
            return
        self._coordinator = None
        coordinator._members.pop(self.replica, None)
        self.clock.after(self.clock.between(0.01, 0.4), self._join, run.assign, run.assign.members[0])
        self.clock.after(RECONNECT_SECONDS, self._still_apart, coordinator, run)

    def _still_apart(self, coordinator: AgentProcess, run: Collective) -> None:
        if self.collective is run and self._coordinator is None:
            self.handle(e.CoordinatorGone(*self._round_of(self), "could not be reached again"))
        if coordinator.collective is run and self.replica not in coordinator._members:
            coordinator.handle(e.MemberGone(*self._round_of(coordinator), self.replica, "could not be reached again"))

    def _copy_from(self, effect: e.CopyFrom) -> None:
        if self.collective is not None:
            self.collective.copiers[effect.member.replica] = self

    def _drop(self, effect: e.DropSnapshots) -> None:
        for key in [key for key in self.pod.volume if key[0] in effect.ids]:
            del self.pod.volume[key]

    def _to_worker(self, effect: e.SendToWorker) -> None:
        if self.collective is None:
            return
        if isinstance(effect.message, w.DrainRequest):
            self.collective.drain = effect.message
        elif effect.rank in self.collective.copied:
            self.collective.copied[effect.rank] = max(self.collective.copied[effect.rank], effect.message.step)

    def _signal(self, effect: e.SignalWorkers) -> None:
        self._end_round()

    def _to_members(self, effect: e.Broadcast) -> None:
        for name, member in self._members.items():
            if effect.only in ("", name):
                self._say(member, e.CoordinatorMessage(*self.core.seen, effect.message), self.world.network.delay())

    def _stacks(self, effect: e.CollectStacks) -> None:
        stacks = self.collective.stacks(self) if self.collective is not None else {}
        self.clock.after(self.clock.between(0.05, 1.0), self.handle, e.StacksCollected(effect.round, stacks))

    def _changed(self, effect: e.ReportChanged) -> None:
        if self._coordinator is not None:
            self._say(self._coordinator, e.MemberMessage(self.core.member_state()), 0.002)
        self.tell_operators()

    def tell_operators(self) -> None:
        for operator in list(self.watchers):
            self.tell_operator(operator)

    def report(self) -> p.Report:
        """Return the agent's report as an operator receives it."""
        report = self.core.report()
        return self.bounded(report if self.lie is None else self.lie(report))

    def bounded(self, message: M) -> M:
        """Return the report within bounds. Without liars, every report is within bounds."""
        return bounds.bounded(message) if self.world.invariants.lies else message

    def tell_operator(self, operator: OperatorProcess) -> None:
        arrives = max(self.watchers[operator] + 1e-6, self.clock.now + self.world.network.delay())
        self.watchers[operator] = arrives
        self.clock.after(arrives - self.clock.now, operator.reported, self, self.report())

    def _exit(self, effect: e.Exit) -> None:
        """Exit, and send the reason to every connected end."""
        if not self._goes:
            self._goes = True
            self.clock.after(FAREWELL_SECONDS, self._gone_with, effect.code)

    def _gone_with(self, code: int) -> None:
        if self.alive:
            self.die()
            self.world.cluster.process_ended(self.pod, code)

    # --- storage

    def _probe(self) -> None:
        if not self.alive:
            return
        storage = self.world.storage
        if storage.up and self.world.network.reaches(self.host, "s3"):
            self.handle(e.StorageSeen(p.Storage("Ready", storage.latest)))
        else:
            self.handle(e.StorageSeen(p.Storage("Error", None, "the bucket can't be reached")))
            self.clock.after(1.0, self._probe)

    def _look_again(self, effect: e.ProbeStorage) -> None:
        self.clock.after(self.clock.between(0.005, 0.1), self._probe)

    def _storage_near(self, id: p.SnapshotId) -> bool | None:
        """Return whether storage is reachable now; None if nobody waits for it any more."""
        if not self.alive or self.core.seen[0] != id.round:
            return None
        return self.world.storage.up and self.world.network.reaches(self.host, "s3")

    def _ship(self, effect: e.Ship) -> None:
        self.clock.after(self.clock.between(0.02, 0.3), self._shipped, effect)

    def _shipped(self, effect: e.Ship) -> None:
        near = self._storage_near(effect.id)
        if near:
            key = (effect.id, effect.shard)
            if key in self.pod.volume:
                self.world.storage.parts[key] = self.pod.volume[key]
                self.handle(e.PartShipped(p.Part(effect.id, effect.shard)))
        elif near is not None:
            self.clock.after(0.5, self._shipped, effect)

    def _undo(self, effect: e.Undo) -> None:
        self._undone.append(effect.undone)
        self.clock.after(self.clock.between(0.005, 0.1), self._undo_now, effect.undone)

    def _undo_now(self, undone: p.Undone) -> None:
        if not self.alive or undone not in self._undone:
            return
        if not self.world.storage.up or not self.world.network.reaches(self.host, "s3"):
            self.clock.after(0.5, self._undo_now, undone)
            return
        self._undone.remove(undone)
        self.handle(e.StorageSeen(p.Storage("Ready", self.world.storage.undo(undone))))

    def _publish(self, effect: e.Publish) -> None:
        self.clock.after(self.clock.between(0.005, 0.1), self._read_latest, effect)

    def _read_latest(self, effect: e.Publish) -> None:
        near, storage = self._storage_near(effect.id), self.world.storage
        if not near or self._undone:
            if near is not None:
                self.clock.after(0.5, self._read_latest, effect)
        elif storage.refuses(effect.id):
            self.handle(e.PublishDone(effect.id, None, "a later round has written LATEST"))
        else:
            self.clock.after(self.clock.between(0.005, 0.1), self._move_latest, effect, storage.etag)

    def _move_latest(self, effect: e.Publish, etag: int) -> None:
        # A publisher that was killed may have sent its last write, which does not stop with its process.
        if not self.world.storage.up or not self.world.network.reaches(self.host, "s3"):
            self.clock.after(0.5, self._read_latest, effect)
        elif (durable := self._moved(effect, etag)) is None:
            self._read_latest(effect)
        else:
            self.handle(e.PublishDone(effect.id, durable))

    def _moved(self, effect: e.Publish, etag: int) -> p.Durable | None:
        return self.world.storage.move(effect.id, effect.complete, etag, self.world.rollbacks.recorded)

    # --- ends

    def die(self) -> None:
        """Die at once. Messages that were sent are still on their way."""
        if not self.alive:
            return
        self.alive = False
        collective, self.collective = self.collective, None
        if collective is not None:
            collective.leave(self)
        self._unlink()
        for operator in list(self.watchers):
            if self.world.network.carries(self.host, operator.name):
                self.clock.after(self.world.network.delay(), operator.stream_ended, self)
        self.watchers.clear()


EFFECTS: dict[type, Callable[[AgentProcess, Any], None]] = {
    e.PersistSeen: AgentProcess._persist,
    e.KillWorkers: AgentProcess._kill,
    e.BindStore: AgentProcess._bind,
    e.PingPeers: AgentProcess._reach_out,
    e.Reply: AgentProcess._reply,
    e.StartRound: AgentProcess._start,
    e.CopyFrom: AgentProcess._copy_from,
    e.DropSnapshots: AgentProcess._drop,
    e.SendToWorker: AgentProcess._to_worker,
    e.SignalWorkers: AgentProcess._signal,
    e.Broadcast: AgentProcess._to_members,
    e.Ship: AgentProcess._ship,
    e.Publish: AgentProcess._publish,
    e.Undo: AgentProcess._undo,
    e.ProbeStorage: AgentProcess._look_again,
    e.CollectStacks: AgentProcess._stacks,
    e.ReportChanged: AgentProcess._changed,
    e.Exit: AgentProcess._exit,
    e.IllegalTransition: AgentProcess._stray,
}
