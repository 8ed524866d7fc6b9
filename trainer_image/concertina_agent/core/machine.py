"""State machine of the agent: `step` handles one event at a time and returns the effects that must be carried out.

The function is deterministic and has no side effects: it uses no clock, I/O or threads. The agent's event loop
(`agent`) and the simulation call the same function.

    agent = AgentState(replica, uid, instance, workers, bundled=True, storage=Storage(StorageHealth.UNKNOWN))
    effects = step(agent, event, now, at)     # now: monotonic seconds, at: Unix seconds (only for Failure.at)
    agent.report() -> protocol.Report         # streamed by Watch
    agent.member_state() -> MemberState       # sent by a member to its coordinator
    agent.seen -> (round, claim)              # the highest ever seen

The module `agent_state` contains the facts, `states` the states and their transitions, and `events` the events and
effects. The table HANDLERS maps each event to its function, and REQUESTS maps each request to its function. Effects
must be carried out in order.

Rules for requests:
- A request is refused if the agent has seen a higher round, or the same round with another claim. A claim is the
  operator's decision to begin a round. The agent writes the highest round to the volume before the round has any
  effect, and reads it after a restart.
- A Prepare of a higher round leads to PersistSeen, KillWorkers, BindStore and PingPeers. A Prepare of the same round
  after a restart of the agent leads to the same effects. The agent sends the Reply only after the events WorkersGone,
  StoreBound and Reached.
- If the same Prepare arrives again, the agent gives the same answer and kills no workers. If a repeated Prepare names
  different candidates, and the Assign has not arrived yet, the agent sends a Ping to the new candidates.
- An Assign leads to StartRound once, if this (round, claim) is prepared and the Assign names the agent's instance id.
  If the same Assign arrives again, the agent accepts it without effect.

Rules for the end of a round:
- Only two events kill workers: a Prepare, and the end of a command's grace period. After a round has failed, its
  workers therefore still exist until the next Prepare.
- The coordinator collects MemberState lines. A member is lost (MemberLost) if it is silent, its stream stays broken, or
  it does not join. In the same way, a member can lose the coordinator (CoordinatorLost).
- The cause of a round's end is a failure that is not a consequence of a lost connection to another rank. Failures that
  are such consequences are `secondary`. If all failures look like consequences, the coordinator reports none for
  SETTLE_SECONDS, because the cause usually arrives in that time.
- An agent is drained when, after a drain, its workers have ended and another replica has copied their last snapshot, or
  the grace period is over. The coordinator reports drained when every member is drained. If the drain is `durable`, the
  checkpoint of that step must also be in storage, unless a member was lost before it had uploaded its shard.
- An agent has succeeded when its workers have finished. The coordinator reports succeeded when the workers of every
  member have finished and the final checkpoint is published. The coordinator's heartbeats tell the members. All agents
  then exit with 0 after LINGER_SECONDS.
- An agent with a TerminationNotice reports draining to the coordinator. It exits when its workers are gone and their
  snapshots are copied and uploaded, or when the grace period is over. If only departing agents have the training state,
  the agent stays until the operator sends a Release.

Rules for snapshots:
- At the Assign of a new round, snapshots are deleted that are later than the step from which the round continues.
- Snapshots of older rounds are deleted when this round has a snapshot whose shards are all copied to another replica.
  Rank 0 reports that this snapshot exists, and the coordinator's heartbeats pass the report on to the members.

The coordinator is the agent of rank 0. In a drain, all ranks stop after the same step. A snapshot is a copy of the
training state in node memory.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core import states
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.steps import draining, members, own_state, preparing, storage, worker_steps

LINGER_SECONDS = 5.0
"""Seconds from the success of a round until the agent exits with 0.

In this time, the operator and the members learn of the success (decision "Agents leave by themselves after success").
"""
EXIT_NOTICED = 128 + signal.SIGTERM
STOOD_STILL_SECONDS = 1.0
"""Seconds without an event after which the agent assumes that it was suspended.

Usually there are four ticks per second. If there was no event for longer, this process was stopped, had no CPU time, or
its machine was asleep. Other agents may have been suspended too. The agent therefore treats no member as silent because
of this time (decision "Pauses of a process do not count as silence").
"""


def step(agent: AgentState, event: e.Event, now: float, at: float = 0.0) -> list[e.Effect]:
    """Process one event, and return the effects, which must be carried out in order."""
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
    """Return an Exit effect if this agent may exit, because the round has succeeded or the agent must terminate.

    The coordinator is the agent of rank 0. The coordinator determines whether the round has succeeded, and tells the
    other members in its heartbeats.
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


def on_gpu_fault_seen(agent: AgentState, event: e.GpuFaultSeen, t: e.Moment) -> list[e.Effect]:
    if agent.gpu_fault and not event.by_preflight:
        return []
    agent.gpu_fault = agent.gpu_fault or event.clause
    agent.preflight_failed = agent.preflight_failed or event.by_preflight
    return own_state.changed(agent, t)


def on_preflight_done(agent: AgentState, event: e.PreflightDone, t: e.Moment) -> list[e.Effect]:
    agent.preflight = False
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
    e.GpuFaultSeen: on_gpu_fault_seen,
    e.PreflightDone: on_preflight_done,
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
