"""The agent's decisions as one state machine: `step` takes one event at a time and says what must be done. Pure and
deterministic: no clock, no I/O, no threads; the shell (`agent`) and the simulation drive the same function.

    agent = AgentState(replica, uid, instance, workers, bundled=True, storage=Storage(StorageHealth.UNKNOWN))
    effects = step(agent, event, now, at)     # now: monotonic seconds, at: Unix seconds (only for Failure.at)
    agent.report() -> protocol.Report         # what Watch streams
    agent.member_state() -> MemberState       # what a member tells its coordinator
    agent.seen -> (round, claim)              # the highest ever seen

The facts are in `agent_state`, the states and their arrows in `states`, events and effects in `events`; what an event
does is the function that HANDLERS names (for a request: REQUESTS). Effects are to be carried out in order. The rules:
- A request of a lower round than the highest seen, or of that round under another claim, is refused. What is seen is
  persisted before anything follows from it; `seen` is what a restarted agent reads back.
- Prepare (higher, or the same again once the agent restarted) -> PersistSeen, KillWorkers, BindStore, PingPeers, and
  the Reply only after WorkersGone, StoreBound and Reached. The same Prepare again: the same answer, nothing killed. The
  same round and claim with other candidates, before the Assign: only they are reached out to anew.
- Assign -> StartRound once, if this (round, claim) is prepared and the instance id is ours. The same again: Accepted.
- Workers are killed by a Prepare alone (and by the end of a command's grace). A round that failed waits for it.
- The coordinator collects MemberState lines; silence (Tick), a stream that stays broken or no Join is MemberLost.
  Members treat the coordinator alike (CoordinatorLost). The cause is a failure that no lost peer provokes, what follows
  is `secondary`; where all look provoked the coordinator says nothing for SETTLE_SECONDS, as the cause is usually on
  its way.
- drained: all own workers ended after a drain and the peer has copied their last snapshot (or the grace is over). The
  coordinator's own report says drained only when every member is, and with `durable` only when LATEST names that step,
  or a member is gone with a part that it had not shipped.
- succeeded: all own workers are through; the coordinator's report: every member's are, and the final checkpoint is
published.
- Snapshots beyond the base of a new round are dropped at its Assign; those of older rounds once this one has a snapshot
  complete on all peers, as rank 0 knows and the coordinator's beats say.
- A round that has succeeded as a whole (the coordinator's beats say so) ends its agents with 0 after LINGER_SECONDS.
- A Notice says draining to the coordinator and exits when the workers are gone, copied and shipped, or the grace is
over.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core import states
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.steps import draining, members, preparing, storage, worker_steps

LINGER_SECONDS = 5.0
"""From a round's success to the agent's exit with 0: time for the operator and the members to hear of it (decision
"Agents leave by themselves after success")."""
EXIT_NOTICED = 128 + signal.SIGTERM
STOOD_STILL_SECONDS = 1.0
"""Between two events, of which the shell's ticks alone come four times a second: this agent did not run (stopped,
starved, its machine asleep), and perhaps the others did not either. That it heard nothing is nobody's silence then
(decision "Who stood still accuses nobody")."""


def step(agent: AgentState, event: e.Event, now: float, at: float = 0.0) -> list[e.Effect]:
    """Take one event; the effects are to be carried out in order."""
    t, last, before = e.Moment(now, at), agent.last_event, agent.state
    agent.last_event = t
    if agent.round is not None and last is not None and now - last.now >= STOOD_STILL_SECONDS:
        agent.round.discount_pause(now - last.now)
    effects = HANDLERS[type(event)](agent, event, t)
    effects = [*effects, *_leave(agent, t)]
    effects += states.illegal(before, event, agent.state)
    others: list[e.Effect] = [effect for effect in effects if not isinstance(effect, e.ReportChanged)]
    return others if len(others) == len(effects) else [*others, e.ReportChanged()]


def _leave(agent: AgentState, t: e.Moment) -> list[e.Effect]:
    """The round has succeeded as a whole (the coordinator sees that itself, members hear of it in its beats), or there
    was a notice."""
    r, notice = agent.round, agent.notice
    if r is not None:
        if r.coordinator is not None and r.succeeded_at is None and r.workers.all_complete():
            r.succeeded_at = t.now if agent.reported is states.OwnState.SUCCEEDED else None
        if r.succeeded_at is not None and t.now >= r.succeeded_at + LINGER_SECONDS:
            return [e.Exit(0)]
    if notice is not None and (agent.at_rest() or t.now >= notice.until):
        return [e.Exit(0 if agent.all_succeeded() else EXIT_NOTICED)]
    return []


def on_request_received(agent: AgentState, event: e.RequestReceived, t: e.Moment) -> list[e.Effect]:
    message = event.message
    if message.uid != agent.uid:
        return [agent.refuse(event.request, f"this replica belongs to job {agent.uid}, not {message.uid}")]
    return REQUESTS[type(message)](agent, event.request, message, t)


def on_tick(agent: AgentState, event: e.Tick, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if r is None:
        return []
    effects = [*worker_steps.update_heartbeats(agent, r, event, t), *draining.drain_alone(agent, r, t)]
    if r.coordinator is not None:
        effects += members.check_members(agent, r, r.coordinator, t)
    elif t.now >= r.silent_at:
        effects += members.coordinator_lost(agent, "has been silent or out of reach for too long", t)
    return [*effects, *draining.end_of_grace(agent, r, t)]


def on_tracking_seen(agent: AgentState, event: e.TrackingSeen, t: e.Moment) -> list[e.Effect]:
    agent.tracking = event.trouble
    return [e.ReportChanged()]


def on_warm(agent: AgentState, event: e.Warm, t: e.Moment) -> list[e.Effect]:
    agent.ready, agent.startup_error = not event.error, event.error
    return [e.ReportChanged()]


def on_learning(agent: AgentState, event: e.Learning, t: e.Moment) -> list[e.Effect]:
    agent.learning = event.under_way
    return [e.ReportChanged()]


def on_warm_start_known(agent: AgentState, event: e.WarmStartKnown, t: e.Moment) -> list[e.Effect]:
    agent.warm_start = event
    return [e.ReportChanged()]


HANDLERS: Mapping[type, Callable[[AgentState, Any, e.Moment], list[e.Effect]]] = {
    e.RequestReceived: on_request_received,
    e.WorkersGone: preparing.on_workers_gone,
    e.StoreBound: preparing.on_store_bound,
    e.Reached: preparing.on_reached,
    e.StartFailed: worker_steps.on_start_failed,
    e.WorkerMessage: worker_steps.on_worker_message,
    e.WorkerExited: worker_steps.on_worker_exited,
    e.StacksCollected: worker_steps.on_stacks_collected,
    e.MemberMessage: members.on_member_message,
    e.MemberGone: members.on_member_gone,
    e.CoordinatorJoined: members.on_coordinator_joined,
    e.CoordinatorMessage: members.on_coordinator_message,
    e.CoordinatorGone: members.on_coordinator_gone,
    e.PeerCopied: storage.on_peer_copied,
    e.CopyHeld: storage.on_copy_held,
    e.PartShipped: storage.on_part_shipped,
    e.PublishDone: storage.on_publish_done,
    e.StorageSeen: storage.on_storage_seen,
    e.TerminationNotice: draining.on_termination_notice,
    e.TrackingSeen: on_tracking_seen,
    e.Warm: on_warm,
    e.Learning: on_learning,
    e.WarmStartKnown: on_warm_start_known,
    e.WorldsSeen: worker_steps.on_worlds_seen,
    e.Tick: on_tick,
}
REQUESTS: Mapping[type, Callable[[AgentState, int, Any, e.Moment], list[e.Effect]]] = {
    p.Prepare: preparing.on_prepare,
    p.Assign: preparing.on_assign,
    p.Drain: draining.on_drain,
    p.Save: members.on_save,
    p.Join: members.on_join,
    p.Ping: members.on_ping,
    p.Trace: worker_steps.on_trace,
}
