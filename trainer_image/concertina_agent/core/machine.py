"""Decisions of the agent as one state machine: `step` handles one event at a time and returns what must be done.

The function is pure and deterministic, without clock, I/O and threads. The shell (`agent`) and the simulation call the
same function.

    agent = AgentState(replica, uid, instance, workers, bundled=True, storage=Storage(StorageHealth.UNKNOWN))
    effects = step(agent, event, now, at)     # now: monotonic seconds, at: Unix seconds (only for Failure.at)
    agent.report() -> protocol.Report         # streamed by Watch
    agent.member_state() -> MemberState       # sent by a member to its coordinator
    agent.seen -> (round, claim)              # the highest ever seen

The facts are in `agent_state`, the states and their transitions in `states`, events and effects in `events`. HANDLERS
names the function that handles an event (for a request: REQUESTS). Effects must be carried out in order. The rules:
- A request of a lower round than the highest seen, or of that round under another claim, is refused. The highest round
  is persisted before anything follows from it. A restarted agent reads it back.
- A Prepare (of a higher round, or the same one after a restart) leads to PersistSeen, KillWorkers, BindStore and
  PingPeers. The Reply follows only after WorkersGone, StoreBound and Reached. The same Prepare again gets the same
  answer and kills nothing. If the same round and claim come with other candidates before the Assign, only these are
  pinged again.
- An Assign leads to StartRound once, if this (round, claim) is prepared and the instance id is that of this agent. The
  same Assign again is accepted.
- Only a Prepare kills workers (and the end of a command's grace period). A round that failed waits for it.
- The coordinator collects MemberState lines. Silence (Tick), a stream that stays broken, or a missing Join is
  MemberLost. Members treat the coordinator alike (CoordinatorLost). The cause is a failure that was not provoked by a
  lost peer, and its consequences are `secondary`. If all failures look provoked, the coordinator reports none for
  SETTLE_SECONDS, because the cause usually arrives in that time.
- drained: all own workers ended after a drain and the peer has copied their last snapshot (or the grace period is
  over). The coordinator reports drained only when every member is. With `durable`, LATEST must also name that step,
  unless a member is gone with a part that it had not shipped.
- succeeded: all own workers have finished. The coordinator reports succeeded when the workers of every member have
  finished, and the final checkpoint is published.
- Snapshots beyond the base of a new round are deleted at its Assign. Those of older rounds are deleted once this round
  has a snapshot that is complete on all peers, as rank 0 knows and the coordinator's heartbeats say.
- If a round has succeeded as a whole (the coordinator's heartbeats say so), its agents exit with 0 after
  LINGER_SECONDS.
- A TerminationNotice makes an agent report draining to the coordinator. The agent exits when the workers are gone,
  copied and shipped, or the grace period is over. If only this agent and others that leave hold the state, it stays
  until the operator sends a Release.
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
"""Seconds from a round's success to the agent's exit with 0.

In this time, the operator and the members receive the news (decision "Agents leave by themselves after success").
"""
EXIT_NOTICED = 128 + signal.SIGTERM
STOOD_STILL_SECONDS = 1.0
"""Seconds between two events from which this agent is assumed to have been suspended.

The shell alone sends four ticks a second. So after such a gap, this agent did not run (it was stopped, or had no CPU
time, or its machine was asleep), and perhaps the other agents did not run either. Silence in this time does not count
against any member (decision "Time in which a process did not run").
"""


def step(agent: AgentState, event: e.Event, now: float, at: float = 0.0) -> list[e.Effect]:
    """Handle one event, and return the effects, which must be carried out in order."""
    t, last, before = e.Moment(now, at), agent.last_event, agent.state
    agent.last_event = t
    if agent.round is not None and last is not None and now - last.now >= STOOD_STILL_SECONDS:
        agent.round.discount_pause(now - last.now)
    effects = HANDLERS[type(event)](agent, event, t)
    effects = [*effects, *_leave(agent, t)]
    effects += states.illegal(before, event, agent.state)
    other_effects: list[e.Effect] = [effect for effect in effects if not isinstance(effect, e.ReportChanged)]
    return other_effects if len(other_effects) == len(effects) else [*other_effects, e.ReportChanged()]


def _leave(agent: AgentState, t: e.Moment) -> list[e.Effect]:
    """Return an Exit if the round has succeeded as a whole, or if there was a notice and the agent may exit.

    The coordinator determines the success itself. Members learn of it from its heartbeats.
    """
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
    p.Release: preparing.on_release,
    p.Drain: draining.on_drain,
    p.Save: members.on_save,
    p.Join: members.on_join,
    p.Ping: members.on_ping,
    p.Trace: worker_steps.on_trace,
}
