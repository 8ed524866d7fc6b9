"""Workers of one assigned round, which load, train, take snapshots and stop. A step finishes only if all take part."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_protocol import worker_channel as w
from concertina_state.errors import InvalidInput
from concertina_trainer.errors import RollBack
from simulation.parts.clock import Violation, changed
from simulation.parts.judging import USUAL, Judge
from simulation.parts.lineage import FRESH, Lineage, check_lineage, steps_of
from simulation.parts.survivors import LOST

if TYPE_CHECKING:
    from simulation.parts.agents import AgentProcess
    from simulation.runs.world import World

AFTER_THE_CULPRIT = 0.5
"""Seconds by which `worker` lets the rank with the corruption report first."""
CONNECT = 10.0
"""Seconds for which workers try to connect to each other."""
STUCK = ("Current thread", '  File "train.py", line 7 in step')
WAITING = ("Current thread", '  File "/torch/distributed/c10d.py", line 9 in all_reduce')


class Collective:
    def __init__(self, world: World, assign: p.Assign) -> None:
        self.world, self.clock, self.assign = world, world.clock, assign
        self.round = assign.round
        self.shards = sum(member.workers for member in assign.members)
        self.here: dict[str, AgentProcess] = {}
        """Members whose workers have loaded their state."""
        self.copied: dict[int, int] = dict.fromkeys(range(self.shards), -1)
        self.copiers: dict[str, AgentProcess] = {}
        """Copiers by the replica that is copied from."""
        self.lineage: Lineage | None = None
        self.judge: Judge | None = None
        self._durable: p.Durable | None = None
        """Checkpoint that rank 0 found to continue from, if not every one under LATEST is good."""
        self.broken = self.over = self.stepping = False
        self.delayed = False
        """Whether the step in progress could not end when it was due, because the workers wait for one of them."""
        self.parted = False
        """Whether the round broke, so that each surviving worker has ended the step in progress by itself."""
        self.stopped: dict[str, float] = {}
        """Time until which the workers of a member are stopped (SIGSTOP), by member."""
        self.hung: dict[str, float] = {}
        """Time until which the first worker of a member does not finish its step, by member."""
        self.drain: w.DrainRequest | None = None
        self.snapshots: list[int] = []
        self.first_step_at = 0.0
        self.moved_at = self.clock.now
        """Time at which any worker last made progress."""
        self.begun = 0.0
        """Time at which the current step began."""
        self._busy: dict[str, float] = {}
        """Seconds of own work of each member's workers, in finished steps except the first."""

    # --- start

    def start(self, process: AgentProcess) -> None:
        self.clock.after(self.clock.between(0.02, 0.2), self._load, process)

    def _load(self, process: AgentProcess) -> None:
        if process.collective is not self:
            return
        ranks = process.ranks
        for rank in ranks:
            process.handle(e.WorkerMessage(self.round, rank, w.Hello(rank, 1)))
        lineage = self._restored(process)
        if lineage is None:
            self._fail(process, w.Fault("RestoreFailed", "the state to continue from can't be had"))
            return
        if self.lineage is not None and self.here and lineage != self.lineage:
            raise Violation(f"members of round {self.round} start from different states: {lineage}, {self.lineage}")
        if self.lineage is None:
            self.world.rollbacks.restored(self.round, lineage)
        self.lineage, process.live = lineage, None
        self.here[process.replica] = process
        self.moved_at = self.clock.now
        self._meet(process, self.clock.now + CONNECT)

    def _meet(self, process: AgentProcess, until: float) -> None:
        """Connect all workers to all others, in either direction."""
        if self.broken or self.over or process.collective is not self or len(self.here) < len(self.assign.members):
            return
        hosts = [other.host for other in self.here.values()]
        if all(self.world.network.reaches(a, b) for a in hosts for b in hosts):
            self._try_step()
        elif self.clock.now < until:
            self.clock.after(0.3, self._meet, process, until)
        else:
            self._lost_peer(process)

    def _restored(self, process: AgentProcess) -> Lineage | None:
        restore = self.assign.restore
        if restore.source == "Fresh":
            return FRESH
        if restore.source == "Storage":
            return self._stored(process, restore)
        states: list[Lineage] = []
        for shard, holders in restore.holders.items():
            data = next(
                (data for name in holders if (data := self._pulled(process, name, int(shard))) is not None), None
            )
            if data is None:
                return None
            states.append(data)
        if restore.id is None or len(states) != restore.id.shards or len(set(states)) != 1:
            raise Violation(f"round {self.round} restores a mixed state: {restore}, {states}")
        if steps_of(states[0]) != restore.step:
            raise Violation(f"round {self.round} restores step {steps_of(states[0])}, not {restore.step}")
        return states[0]

    def _stored(self, process: AgentProcess, restore: p.Restore) -> Lineage | None:
        storage, durable = self.world.storage, restore.durable
        if durable is None or not storage.up or not self.world.network.reaches(process.host, "s3"):
            return None
        if restore.voids(durable):
            durable = self._durable = self._durable or storage.go_back(restore.all_undone)
        return storage.checkpoints.get(durable.uri) if durable else FRESH

    def _pulled(self, process: AgentProcess, holder: str, shard: int) -> Lineage | None:
        other = self.world.agents.get(holder)
        id = self.assign.restore.id
        if other is None or id is None or not process.hears(other):
            return None
        if (id, shard) in other.pod.damaged:  # The checksum shows the damage, and the shard is not offered again.
            other.pod.forget(id, shard)
        return other.pod.volume.get((id, shard))

    # --- steps

    def _try_step(self) -> None:
        if self.stepping or self.broken or self.over or len(self.here) < len(self.assign.members):
            return
        if self.lineage is not None and steps_of(self.lineage) >= self.world.steps:
            self._snapshot(steps_of(self.lineage), durable=True, complete=True)
            self._stop("complete")
            return
        self.stepping, self.delayed, self.begun = True, False, self.clock.now
        slowest = max(self._work(process) for process in self.here.values())
        self.clock.after(slowest * self.clock.between(0.9, 1.1), self._finish_step)

    def _work(self, process: AgentProcess) -> float:
        """Return the seconds that a step takes its workers, without waiting for the others."""
        return self.world.step_seconds * self.world.slow_nodes.get(process.host, 1.0)

    def _finish_step(self) -> None:
        self.stepping = False
        if self.broken or self.over:
            return
        if self.held_up:
            self.stepping = self.delayed = True
            self.clock.after(0.3, self._finish_step)
            return
        self.moved_at = self.clock.now
        self.world.invariants.stepping(self)
        try:
            left_out = self._train()
        except RollBack as error:
            self._roll_back(error)
        except (InvalidInput, FloatingPointError) as error:
            self._give_up(error)
        else:
            self._try_step() if left_out else self._stepped()

    @property
    def held_up(self) -> bool:
        """True if the step in progress can't end now, because a worker stands still or can't be reached."""
        if any(until > self.clock.now for held in (self.stopped, self.hung) for until in held.values()):
            return True
        hosts, talk = [process.host for process in self.here.values()], self.world.network.talk
        return any(not talk(hosts[0], host) for host in hosts)

    def trained_ahead(self) -> Lineage | None:
        """Return the state after the step in progress, which the round itself does not reach; None if there is none."""
        before = self.lineage
        try:
            left_out = self._train()
        except (RollBack, InvalidInput, FloatingPointError):
            return None
        after, self.lineage = self.lineage, before
        return None if left_out else after

    def _train(self) -> str:
        """Train one batch, or return why it is skipped."""
        before = self.lineage or FRESH
        if self.judge is None:
            self.judge = Judge(self.world, self.assign.restore, before)
        samples, left_out = self.judge.step(before)
        if left_out:
            self.world.tell(f"round {self.round}: {left_out}")
            return left_out
        known = self.judge.anomalies
        self.lineage = before.stepped(self.round, samples, known.skipped, known.trend)
        check_lineage(self.lineage)
        return ""

    def _stepped(self) -> None:
        step = steps_of(self.lineage or FRESH)
        if self.first_step_at:
            for process in self.here.values():
                self._busy[process.replica] = self._busy.get(process.replica, 0.0) + self._work(process)
        self.first_step_at = self.first_step_at or self.clock.now
        last = step >= self.world.steps
        stop = "complete" if last else "drained" if self.drain else ""
        durable = last or (self.drain is not None and self.drain.durable) or step % self.world.checkpoint_every == 0
        if stop or durable or self.slot_free:
            self._snapshot(step, durable, last)
        self._progress(step)
        if stop:
            self._stop(stop)
        else:
            self._try_step()

    @property
    def slot_free(self) -> bool:
        return len(self.snapshots) < 2 or min(self.copied.values()) >= self.snapshots[-2]

    def id_of(self, step: int) -> p.SnapshotId:
        return p.SnapshotId(self.round, step, f"{self.shards} shards", self.shards)

    def _snapshot(self, step: int, durable: bool, complete: bool) -> None:
        id = self.id_of(step)
        self.snapshots.append(step)
        for process in list(self.here.values()):
            for rank in process.ranks:
                process.pod.keep(id, rank, self.lineage or FRESH)
                process.handle(e.WorkerMessage(self.round, rank, w.Committed(id, rank, "")))
                if durable:
                    process.handle(e.WorkerMessage(self.round, rank, w.WantDurable(id, rank, "", complete)))
            self.copy_soon(process, id)

    def copy_soon(self, process: AgentProcess, id: p.SnapshotId) -> None:
        if copier := self.copiers.get(process.replica):
            self.clock.after(self.clock.between(0.005, 0.05), self._copy, process, copier, id)

    def _copy(self, source: AgentProcess, copier: AgentProcess, id: p.SnapshotId) -> None:
        if not source.alive or not copier.alive or copier.collective is not self or source.collective is not self:
            return
        if not copier.hears(source) or not self.world.network.talk(source.host, copier.host):
            self.clock.after(0.5, self._copy, source, copier, id)
            return
        for rank in source.ranks:
            if (id, rank) not in source.pod.volume or (id, rank) in source.pod.damaged:
                return  # The rank's part is not complete in storage.
            copier.pod.keep(id, rank, source.pod.volume[(id, rank)])
            copier.handle(e.CopyHeld(id, rank))
            source.handle(e.PeerCopied(id, rank))

    def _progress(self, step: int) -> None:
        steps, begun, copied = self.world.steps, self.first_step_at, min(self.copied.values())
        ahead = next((process.ahead for process in self.here.values() if 0 in process.ranks), 0.0)
        at, begun = self.clock.now + ahead, begun + ahead
        took = self.clock.now - self.begun
        safe = None if copied < 0 else copied
        progress = p.Progress(step, steps, USUAL, 1.0, took, step, "training", at, begun, safe)
        if self.judge is not None and self.judge.anomalies.skipped:
            progress = dataclasses.replace(progress, skipped=self.judge.anomalies.skipped)
        for process in list(self.here.values()):
            for rank in process.ranks:
                message = progress if rank == 0 else w.Beat(rank, step, "training")
                process.handle(e.WorkerMessage(self.round, rank, message))

    def _stop(self, outcome: str) -> None:
        self.over = True
        step = steps_of(self.lineage or FRESH)
        for process in list(self.here.values()):
            for rank in process.ranks:
                process.handle(e.WorkerMessage(self.round, rank, w.Done(outcome, step)))
                self.clock.after(self.clock.between(0.001, 0.05), self._exited, process, rank, 0, ())

    # --- what is seen of workers

    def heartbeats(self, process: AgentProcess) -> tuple[p.Heartbeat, ...]:
        if self.over or self.broken or process.replica not in self.here:
            return ()
        step, busy = steps_of(self.lineage or FRESH), self._busy.get(process.replica, 0.0)
        still = self.clock.now - max(self.moved_at, self.begun)
        waits = still > self._work(process) or self._behind(process)
        phase = "starting" if not self.first_step_at and not self.stepping else "reducing" if waits else "computing"
        heartbeats = (p.Heartbeat(rank, step, phase, still, busy) for rank in process.ranks)
        return tuple(
            changed(heartbeat, phase="computing") if self._hangs(process, heartbeat.rank) else heartbeat
            for heartbeat in heartbeats
        )

    def _behind(self, process: AgentProcess) -> bool:
        return self.hung.get(process.replica, 0.0) > self.clock.now

    def _hangs(self, process: AgentProcess, rank: int) -> bool:
        return rank == process.ranks[0] and self._behind(process)

    def stopped_ranks(self, process: AgentProcess) -> tuple[tuple[int, int], ...]:
        """Return the stopped ranks with their CPU time, which does not grow."""
        stopped = self.stopped.get(process.replica, 0.0) > self.clock.now
        return tuple((rank, 0) for rank in process.ranks) if stopped else ()

    def stacks(self, process: AgentProcess) -> dict[int, tuple[str, ...]]:
        """Return the stacks of workers. Those of waiting workers are in a collective."""
        return {rank: STUCK if self._hangs(process, rank) else WAITING for rank in process.ranks}

    # --- ends

    def leave(self, process: AgentProcess) -> None:
        """Remove the workers of a member.

        Workers that wait for them notice a closed connection, or wait forever.
        """
        self.here.pop(process.replica, None)
        if self.over or self.broken:
            return
        self.broken = True
        self.world.survivors.end_step(self, process)
        for other in list(self.here.values()):
            if self.world.network.reaches(process.host, other.host) and self.clock.chance(0.7):
                self.clock.after(self.clock.between(0.01, 0.3), self._lost_peer, other)

    def _lost_peer(self, process: AgentProcess) -> None:
        if (left := self.stopped.get(process.replica, 0.0) - self.clock.now) > 0:
            self.clock.after(left, self._lost_peer, process)
            return
        for rank in process.ranks:
            self._exited(process, rank, 1, LOST)

    def kill_worker(self, process: AgentProcess, signal: int) -> None:
        """Kill one worker of the process; the other workers of the round lose a peer."""
        if process.collective is not self or self.over or process.replica not in self.here:
            return
        self.leave(process)
        rank = process.ranks[self.clock.random.randrange(len(process.ranks))]
        self.clock.after(self.clock.between(0.001, 0.02), self._exited, process, rank, -signal, ())

    def _roll_back(self, error: RollBack) -> None:
        """Let all ranks request the same rollback. If one rank is to blame, it reports first."""
        self.broken = True
        culprit = self.judge.flipped if self.judge is not None and error.reason == "SilentCorruption" else ""
        if culprit:
            self.world.rollbacks.found(culprit)
        for process in list(self.here.values()):
            late = AFTER_THE_CULPRIT if culprit not in ("", process.replica) else 0.0
            reason = "RolledBack" if late else error.reason
            fault = w.Fault(reason, str(error), p.Rollback(error.step, error.skipped))
            self.clock.after(late + self.clock.between(0.001, 0.1), self._fail, process, fault)

    def _give_up(self, error: Exception) -> None:
        self.broken = True
        for process in list(self.here.values()):
            if isinstance(error, InvalidInput):
                self._fail(process, w.Fault("InvalidInput", str(error)), w.BAD_INPUT_EXIT)
            else:
                self._fail(process, w.Fault("LossNotFinite", str(error)))

    def _fail(self, process: AgentProcess, fault: w.Fault, code: int = 1) -> None:
        self.broken = True
        if process.collective is not self or not process.alive:
            return
        for rank in process.ranks:
            process.handle(e.WorkerMessage(self.round, rank, fault))
            self._exited(process, rank, code, ())

    def _exited(self, process: AgentProcess, rank: int, code: int, lines: tuple[str, ...]) -> None:
        if process.collective is self and process.alive:
            process.handle(e.WorkerExited(self.round, rank, code, lines))
