"""The agent's decisions: `AgentCore` takes one event at a time and says what must be done. Pure and deterministic: no
clock, no I/O, no threads; the shell (`agent`) and the simulation drive the same class.

    core = AgentCore(replica, uid, instance, workers, bundled=True, storage=None, seen=(0, ""), held=())
    effects = core.handle(event, now, at)     # now: monotonic seconds, at: Unix seconds (only for Failure.at)
    core.report() -> protocol.Report          # what Watch streams
    core.state() -> protocol.MemberState      # what a member tells its lead
    core.seen -> (round, claim)               # the highest ever seen

Events and effects are the dataclasses of `events`; effects are to be carried out in order. The rules:
- A request of a lower round than the highest seen, or of that round under another claim, is refused. What is seen is
  persisted before anything follows from it; `seen` is what a restarted agent reads back.
- Prepare (higher, or the same again after a restart of the agent) -> PersistSeen, KillWorkers, BindStore, ReachOut, and
  the Reply only after WorkersGone, StoreBound and Reached. The same Prepare again: the same answer, nothing killed. The
  same round and claim with other candidates, before the Assign: only they are reached out to anew.
- Assign -> StartRound once, if this (round, claim) is prepared and the instance id is ours. The same again: Accepted.
- Workers are killed by a Prepare alone (and by the end of a command's grace). A round that failed waits for it.
- The lead collects MemberState lines; silence (Tick), a broken stream or no Join is MemberLost. Members treat the lead
  alike (LeadLost). The cause is a failure that no lost peer provokes, what follows is `secondary`; where all look
  provoked the lead says nothing for SETTLE_SECONDS, as the cause is usually on its way.
- drained: all own workers ended after a drain and the peer has copied their last snapshot (or the grace is over). The
  lead's own report says drained only when every member is, and with `durable` only when LATEST names that step, or
  a member is gone with a part that it had not shipped.
- succeeded: all own workers are through; the lead's report: every member's are, and the final checkpoint is published.
- Snapshots beyond the base of a new round are dropped at its Assign; those of older rounds once this one has a snapshot
  complete on all peers, as rank 0 knows and the lead's beats say.
- A round that has succeeded as a whole (the lead's beats say so) ends its agents with 0 after LINGER_SECONDS.
- A Notice says draining to the lead and exits when the workers are gone, copied and shipped, or the grace is over.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.failures import worker_failure, worker_stopped
from concertina_agent.core.lead import Lead
from concertina_agent.core.membership import Membership
from concertina_agent.core.preparing import Preparing
from concertina_protocol import worker_channel as w

LINGER_SECONDS = 5.0
"""From a round's success to the agent's exit with 0: time for the operator and the members to hear of it."""

STOOD_STILL_SECONDS = 1.0
"""Between two events, of which the shell's ticks alone come four times a second: this agent did not run (stopped,
starved, its machine asleep), and perhaps the others did not either. That it heard nothing is nobody's silence then."""


class AgentCore(Preparing):
    """An agent's state that takes events, one at a time."""

    def handle(self, event: e.Event, now: float, at: float = 0.0) -> list[e.Effect]:
        """Take one event; the effects are to be carried out in order."""
        if self._round is not None and now - self._now >= STOOD_STILL_SECONDS:
            self._round.not_heard_for(now - self._now)
        self._now, self._at, self._effects, self._changed = now, at, [], False
        _ON[type(event)](self, event)
        if not self._leave_if_succeeded():
            self._leave_if_noticed()
        return [*self._effects, e.ReportChanged()] if self._changed else self._effects

    # --- requests ---------------------------------------------------------------------------------------------------

    def _asked(self, event: e.Asked) -> None:
        message = event.message
        if message.uid != self.uid:
            return self._refuse(event.request, f"this replica belongs to job {self.uid}, not {message.uid}")
        _ON_REQUEST[type(message)](self, event.request, message)
        return None

    def _drain(self, request: int, message: p.Drain) -> None:
        r = self._round
        if (message.round, message.claim) != self.seen:
            return self._refuse(request, self._older(message.round))
        if r is None or r.lead is None:
            return self._refuse(request, f"{self.replica} does not lead round {message.round}")
        self._reply(request, p.Accepted(*self.seen))
        if r.drain is None or (message.durable and not r.drain.durable):
            self._effects.append(e.ToMembers(message))
            self._begin_drain(r, message)
        return None

    def _save(self, request: int, message: p.Save) -> None:
        r = self._round
        if (message.round, message.claim) != self.seen:
            return self._refuse(request, self._older(message.round))
        if r is None or r.lead is None:
            return self._refuse(request, f"{self.replica} does not lead round {message.round}")
        self._reply(request, p.Accepted(*self.seen))
        if self._bundled and r.drain is None:
            self._effects.append(e.ToWorker(0, w.SaveNow()))
        return None

    def _join(self, request: int, message: p.Join) -> None:
        r = self._round
        if (message.round, message.claim) != self.seen or r is None or r.lead is None:
            return self._refuse(request, f"{self.replica} does not lead round {message.round} (yet)")
        if refusal := r.lead.join(message, self._now):
            return self._refuse(request, refusal)
        self._reply(request, p.Accepted(*self.seen))
        if r.drain is not None:
            self._effects.append(e.ToMembers(r.drain, only=message.replica))
            if r.stopping.call is not None:
                self._effects.append(e.ToMembers(p.StopAt(r.stopping.call), only=message.replica))
        return None

    def _ping(self, request: int, message: p.Ping) -> None:
        self._reply(request, p.Accepted(*self.seen))

    # --- own workers ------------------------------------------------------------------------------------------------

    def _worker_said(self, event: e.WorkerSaid) -> None:
        r = self._current(event.round)
        if r is None or event.rank not in r.workers.ranks:
            return
        r.workers.said(event.rank, event.message)
        message = event.message
        if isinstance(message, (w.Beat, p.Progress)):
            r.hearts.told(event.rank, message.step, message.phase, self._now)
        if isinstance(message, w.Committed):
            self._committed(r, message)
        elif isinstance(message, p.Progress):
            self._complete_on_peers(r, message.snapshot_step)
            if r.lead is not None:
                r.lead.watchdog.step_took(message.step_seconds)
        elif isinstance(message, w.WantDurable):
            self._durability.wanted(message)
            self._effects.append(e.Ship(message.id, message.shard, message.path))
        elif isinstance(message, w.Fault) and message.rollback is not None and r.lead is not None:
            self._undo((p.Undone(event.round, message.rollback.step),))
        elif isinstance(message, w.Register):
            self._effects += r.stopping.attends(event.rank)
        elif isinstance(message, w.CallCount):
            r.stopping.passed(event.rank, message.calls)
        self._own_state_changed()

    def _committed(self, r: Membership, message: w.Committed) -> None:
        self._holdings.committed(message.id, message.shard)
        r.last[message.shard] = message
        self._restored(r, message.id.step)
        if r.lonely:
            self._effects.append(e.ToWorker(message.shard, w.CopiedUpTo(message.id.step)))

    def _worker_exited(self, event: e.WorkerExited) -> None:
        r = self._current(event.round)
        if r is None:
            return
        r.stopping.ended(event.rank)
        stopping = r.drain is not None or self._notice is not None
        if r.stopping.agreed and event.code < 0 and not r.grace_over:
            stopping = False  # nobody has sent it a signal
        worker = r.workers.exited(event.rank, event.code, stopping)
        if worker.outcome == "failed":
            self._fail(worker_failure(self.replica, event, worker.fault, r.workers.step, self._at))
        self._ship_last(r)
        self._own_state_changed()

    def _start_failed(self, event: e.StartFailed) -> None:
        if self._current(event.round) is not None:
            self._fail(p.Failure(self.replica, "StartFailed", event.message, at=self._at))

    def _fail(self, failure: p.Failure) -> None:
        if self._round is not None:
            self._round.fail(failure)
            self._own_state_changed()

    # --- lead and members -------------------------------------------------------------------------------------------

    def _member_said(self, event: e.MemberSaid) -> None:
        lead = self._round.lead if self._round else None
        if lead is not None and lead.said(self._told(event.state), self._now):
            self._changed = True
            self._publish(lead)
            self._agree_where_to_stop(self._round, lead)
            self._drain_for_notices()

    def _member_gone(self, event: e.MemberGone) -> None:
        lead = self._round.lead if self._round else None
        if lead is not None and (event.round, event.claim) == self.seen:
            self._changed |= lead.lost(event.replica, event.detail or "closed its connection to the lead", self._at)

    def _lead_joined(self, event: e.LeadJoined) -> None:
        if self._round is not None and (event.round, event.claim) == self.seen:
            self._round.silent_at = self._now + p.SILENCE_SECONDS
            self._changed = True

    def _lead_said(self, event: e.LeadSaid) -> None:
        r = self._round
        if r is None or r.lead is not None or (event.round, event.claim) != self.seen:
            return
        r.silent_at = self._now + p.SILENCE_SECONDS
        if isinstance(event.message, p.Drain) and r.drain != event.message:
            self._begin_drain(r, event.message)
        elif isinstance(event.message, p.MemberState):
            self._complete_on_peers(r, event.message.snapshot_step)
            r.leaving = event.message.leaving
            self._collect_stacks(r, event.message.hung)
            if event.message.state == "succeeded" and r.succeeded_at is None:
                r.succeeded_at = self._now
        elif isinstance(event.message, p.StopAt):
            self._effects += r.stopping.stop_at(event.message.call)
        elif isinstance(event.message, p.DurableMoved):
            self._durable_moved(event.message.durable)

    def _lead_gone(self, event: e.LeadGone) -> None:
        if (event.round, event.claim) == self.seen:
            self._lead_lost(event.detail or "closed the connection")

    def _lead_lost(self, detail: str) -> None:
        r = self._round
        if r is None or r.lead is not None:
            return
        r.lead_gone = True
        if self._own_state() in ("succeeded", "drained", "failed"):
            return
        lead = r.assign.members[0].replica
        self._fail(p.Failure(self.replica, "LeadLost", f"The lead {lead} {detail}.", step=r.workers.step, at=self._at))

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _leave_if_succeeded(self) -> bool:
        """The lead sees the round's success itself, members hear of it in the lead's beats."""
        r = self._round
        if r is None or (r.assign.round, r.assign.claim) != self.seen:
            return False
        if r.lead is not None and r.succeeded_at is None and r.workers.all_complete():
            r.succeeded_at = self._now if self._reported_state() == "succeeded" else None
        if r.succeeded_at is None or self._now < r.succeeded_at + LINGER_SECONDS:
            return False
        self._effects.append(e.Exit(0))
        return True

    def _tick(self, event: e.Tick) -> None:
        r = self._round
        if r is None:
            return
        self._look_at_workers(r, event)
        self._drain_alone(r)
        if r.lead is None and self._now >= r.silent_at:
            self._lead_lost("has been silent or out of reach for too long")
        if r.lead is not None:
            for replica, detail in r.lead.overdue(self._now):
                r.lead.lost(replica, detail, self._at)
                self._changed = True
            self._miss_parts(r, r.lead)
            self._changed |= r.lead.settle(self._now)
            r.lead.said(self.state(), self._now)
            self._changed |= r.lead.look(self._now)
            self._collect_stacks(r, r.lead.watchdog.hung)
            self._agree_where_to_stop(r, r.lead)
        if r.drain is not None and not r.grace_over and self._now >= r.drain_until:
            r.grace_over = True
            if not self._bundled:
                self._effects.append(e.SignalWorkers(signal.SIGKILL))
            self._own_state_changed()

    def _miss_parts(self, r: Membership, lead: Lead) -> None:
        """Of the last checkpoint, that will never come: who had them has gone."""
        if self._own_state() == "succeeded" and not self._is_durable(r, lead, "succeeded"):
            for replica in lead.gone_unshipped(r.workers.step):
                lead.lost_part(replica, self._at)

    # --- hangs ------------------------------------------------------------------------------------------------------

    def _look_at_workers(self, r: Membership, event: e.Tick) -> None:
        running = [rank for rank in r.workers.ranks if r.workers.alive(rank)]
        r.hearts.look(event.pulses, running, self._now)
        self._restored(r, max((heartbeat.step for heartbeat in r.hearts.pulses), default=-1))
        for rank in sorted(r.hearts.stopped(event.stopped)):
            if r.failure is None:
                self._fail(worker_stopped(self.replica, rank, r.workers.step, self._at))

    def _collect_stacks(self, r: Membership, hung: bool) -> None:
        if r.hearts.hung(hung):
            self._effects.append(e.CollectStacks(r.assign.round))

    def _stacks_collected(self, event: e.StacksCollected) -> None:
        if (r := self._current(event.round)) is not None:
            r.hearts.collected(event.stacks)
            self._own_state_changed()

    # --- copies and storage -----------------------------------------------------------------------------------------

    def _peer_copied(self, event: e.PeerCopied) -> None:
        r = self._current(event.id.round)
        if r is not None and event.id.step > r.copied.get(event.shard, -1):
            r.copied[event.shard] = event.id.step
            self._effects.append(e.ToWorker(event.shard, w.CopiedUpTo(event.id.step)))
            if r.drain is not None:
                self._own_state_changed()

    def _restored(self, r: Membership, step: int) -> None:
        """A step is finished, in which all ranks took part: so all of them have what they went on from."""
        restore = r.assign.restore
        if restore.source != "Fresh" and step > restore.step and not r.restored:
            r.restored = True
            self._effects.append(e.DropSnapshots(self._holdings.keep(r.assign.round, restore.id)))

    def _complete_on_peers(self, r: Membership, step: int) -> None:
        """A snapshot of this round at `step` is safe everywhere: older rounds are not needed any more."""
        if step > r.assign.restore.step and (older := self._holdings.keep(r.assign.round)):
            self._effects.append(e.DropSnapshots(older))

    def _copy_held(self, event: e.CopyHeld) -> None:
        if self._current(event.id.round) is not None:
            self._holdings.copied(event.id, event.shard)

    def _part_shipped(self, event: e.PartShipped) -> None:
        if self._current(event.part.id.round) is not None:
            self._durability.shipped(event.part)
            self._own_state_changed()

    def _publish_done(self, event: e.PublishDone) -> None:
        if self._current(event.id.round) is None:
            return
        if event.durable is None and self._durability.voids(event.id.round, event.id.step):
            return  # the fence has done what it is there for: storage is well
        if event.durable is None:
            self._storage_seen(e.StorageSeen(p.Storage(p.StorageHealth.ERROR, None, event.message)))
            return
        self._effects.append(e.ToMembers(p.DurableMoved(event.durable)))
        self._durable_moved(event.durable)

    def _durable_moved(self, durable: p.Durable) -> None:
        self._durability.moved(durable, self.seen[0])
        self._own_state_changed()

    def _storage_seen(self, event: e.StorageSeen) -> None:
        self._changed |= self._durability.seen(event.storage, self.seen[0])

    def _warm(self, event: e.Warm) -> None:
        self._ready, self._startup_error, self._changed = not event.error, event.error, True


_ON_REQUEST: Mapping[type, Callable[[AgentCore, int, Any], None]] = {
    p.Prepare: AgentCore._prepare,
    p.Assign: AgentCore._assign,
    p.Drain: AgentCore._drain,
    p.Save: AgentCore._save,
    p.Join: AgentCore._join,
    p.Ping: AgentCore._ping,
}
_ON: Mapping[type, Callable[[AgentCore, Any], None]] = {
    e.Asked: AgentCore._asked,
    e.WorkersGone: AgentCore._workers_gone,
    e.StoreBound: AgentCore._store_bound,
    e.Reached: AgentCore._reached,
    e.StartFailed: AgentCore._start_failed,
    e.WorkerSaid: AgentCore._worker_said,
    e.WorkerExited: AgentCore._worker_exited,
    e.MemberSaid: AgentCore._member_said,
    e.MemberGone: AgentCore._member_gone,
    e.LeadJoined: AgentCore._lead_joined,
    e.LeadSaid: AgentCore._lead_said,
    e.LeadGone: AgentCore._lead_gone,
    e.PeerCopied: AgentCore._peer_copied,
    e.CopyHeld: AgentCore._copy_held,
    e.PartShipped: AgentCore._part_shipped,
    e.PublishDone: AgentCore._publish_done,
    e.StorageSeen: AgentCore._storage_seen,
    e.Warm: AgentCore._warm,
    e.Noticed: AgentCore._noticed,
    e.Tick: AgentCore._tick,
    e.StacksCollected: AgentCore._stacks_collected,
}
