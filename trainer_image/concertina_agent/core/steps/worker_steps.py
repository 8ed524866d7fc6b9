"""Handlers of events of this agent's own workers: their messages and exits."""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.failures import worker_failure, worker_stopped
from concertina_agent.core.round.membership import Membership
from concertina_agent.core.round.workers_state import WorkerOutcome
from concertina_agent.core.steps import draining, own_state, storage
from concertina_protocol import step_traces
from concertina_protocol import worker_channel as w
from concertina_protocol.heartbeat import WorkerPhase


def on_worker_message(agent: AgentState, event: e.WorkerMessage, t: e.Moment) -> list[e.Effect]:
    r, message = agent.current(event.round), event.message
    if r is None or event.rank not in r.workers.ranks or not is_of_round(message, event.round):
        return []
    r.workers.on_message(event.rank, message)
    effects: list[e.Effect] = []
    if isinstance(message, (w.Beat, p.Progress)):
        r.hearts.on_beat(event.rank, message.step, message.phase, t.now)
    if isinstance(message, w.Committed):
        agent.snapshots.committed(message.id, message.shard)
        r.committed(message)
        effects += storage.restored(agent, r, message.id.step)
        if r.lonely:
            effects.append(e.SendToWorker(message.shard, w.CopiedUpTo(message.id.step)))
        effects += draining.ship_last(agent, r)  # the message may be read after the worker has exited
    elif isinstance(message, p.Progress):
        effects += storage.complete_on_peers(agent, r, message.snapshot_step)
        if r.coordinator is not None:
            r.coordinator.watchdog.step_took(message.step_seconds)
    elif isinstance(message, w.WantDurable):
        # `ship_last` may have requested the same upload.
        is_wanted = agent.uploads.is_wanted(message.id, message.shard)
        if not is_wanted and r.ends_at is None:
            agent.uploads.wanted(message)
            effects.append(e.Ship(message.id, message.shard, message.path))
    elif isinstance(message, w.Fault):
        if (back := message.rollback) is not None and r.coordinator is not None and back.undoes(r.assign.uid):
            effects += storage.undo(agent, (p.Undone(event.round, back.step),))
    elif isinstance(message, w.KeepsState):
        effects += storage.keep_state(agent, r)
    elif isinstance(message, w.Register):
        effects += r.stopping.attends(event.rank)
    elif isinstance(message, w.CallCount):
        r.stopping.passed(event.rank, message.calls)
    return [*effects, *own_state.changed(agent, t)]


def is_of_round(message: w.Message, round: int) -> bool:
    """Return whether a message belongs to this round.

    A process may live longer than its round and send a message about a snapshot of the earlier round. A message that
    names no snapshot always belongs to this round.
    """
    return not isinstance(message, (w.Committed, w.WantDurable)) or message.id.round == round


def on_worker_exited(agent: AgentState, event: e.WorkerExited, t: e.Moment) -> list[e.Effect]:
    r = agent.current(event.round)
    if r is None or not r.workers.alive(event.rank):
        return []
    r.stopping.ended(event.rank)
    stopping = r.drain is not None or agent.notice is not None
    if r.stopping.agreed and event.code < 0 and not (r.drain is not None and r.drain.grace_over):
        stopping = False  # the signal is not from this agent
    worker = r.workers.exited(event.rank, event.code, stopping)
    effects: list[e.Effect] = []
    if worker.outcome is WorkerOutcome.FAILED:
        effects += own_state.fail(agent, worker_failure(agent.replica, event, worker.fault, r.workers.step, t.at), t)
    return [*effects, *draining.ship_last(agent, r), *own_state.changed(agent, t)]


def on_start_failed(agent: AgentState, event: e.StartFailed, t: e.Moment) -> list[e.Effect]:
    r = agent.current(event.round)
    if r is None or r.workers.all_over():
        return []
    return own_state.fail(agent, p.Failure(agent.replica, p.FailureReason.START_FAILED, event.message, at=t.at), t)


def on_worlds_seen(agent: AgentState, event: e.WorldsSeen, t: e.Moment) -> list[e.Effect]:
    r = agent.current(event.round)
    if r is None or r.world_mismatch == event.mismatch:
        return []
    r.world_mismatch = event.mismatch
    return own_state.changed(agent, t)


def update_heartbeats(agent: AgentState, r: Membership, event: e.Tick, t: e.Moment) -> list[e.Effect]:
    """Update the phase of each worker from its heartbeat, and report workers that are stopped as failures."""
    running = [rank for rank in r.workers.ranks if r.workers.alive(rank)]
    r.hearts.update(event.heartbeats, running, t.now, event.counts)
    reported = (beat.step for beat in r.hearts.heartbeats if beat.phase != WorkerPhase.BETWEEN_STEPS)
    effects = [*storage.restored(agent, r, max(reported, default=-1)), *_record_counts(agent, r, event, t)]
    for rank in sorted(r.hearts.stopped(event.stopped)):
        if r.failure is None and r.workers.alive(rank):
            effects += own_state.fail(agent, worker_stopped(agent.replica, rank, r.workers.step, t.at), t)
    return effects


def _record_counts(agent: AgentState, r: Membership, event: e.Tick, t: e.Moment) -> list[e.Effect]:
    """Record the optimizer steps of a script that does not report its steps itself."""
    if not any(r.workers.on_count(count, t.at) for count in event.counts):
        return []
    if r.coordinator is not None and r.workers.progress is not None:
        r.coordinator.watchdog.step_took(r.workers.progress.step_seconds)
    return own_state.changed(agent, t)


def collect_stacks(r: Membership, hung: bool) -> list[e.Effect]:
    """Request the stacks of the workers, once for each hang of the round.

    `hung` is whether the coordinator (the agent of rank 0) reports a hang.
    """
    return [e.CollectStacks(r.assign.round)] if r.hearts.hung(hung) else []


def on_stacks_collected(agent: AgentState, event: e.StacksCollected, t: e.Moment) -> list[e.Effect]:
    r = agent.current(event.round)
    if r is None:
        return []
    r.hearts.collected(event.stacks, event.calls)
    return own_state.changed(agent, t)


def on_trace(agent: AgentState, request: int, message: p.Trace, t: e.Moment) -> list[e.Effect]:
    """Start a trace of a worker that reports the ends of its steps."""
    r, most = agent.round, step_traces.MOST_STEPS
    if not step_traces.NAME.fullmatch(message.name) or not 1 <= message.steps <= most or message.first_step < 0:
        return [agent.refuse(request, f"a trace needs a name of hexadecimal digits and from 1 to {most} steps")]
    if r is None or not r.workers.alive(message.rank):
        return [agent.refuse(request, f"rank {message.rank} is not a worker of {agent.replica} now")]
    if not r.workers.traces(message.rank):
        why = (
            "it is a trainer of an earlier version, or a script that has not yet called "
            "trainingjob.report or State.commit"
        )
        return [agent.refuse(request, f"rank {message.rank} can't be traced: {why}")]
    trace_steps = w.TraceSteps(message.first_step, message.steps, message.name)
    return [agent.accept(request), e.SendToWorker(message.rank, trace_steps)]
