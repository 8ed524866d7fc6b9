"""Handlers of a drain, in which all ranks save their state and stop after the same step.

The coordinator is the agent of rank 0. The operator requests a drain, or the coordinator begins it by itself when
members have termination notices.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.coordinator import Coordinator
from concertina_agent.core.round.membership import ActiveDrain, Membership, Notice
from concertina_agent.core.states import OwnState
from concertina_agent.core.steps import own_state
from concertina_protocol import worker_channel as w

OF_COMMANDS = frozenset(
    {p.FailureReason.WORKER_FAILED, p.FailureReason.WORKER_SIGNALED, p.FailureReason.WORKER_EXITED_EARLY}
)
LEAST_GRACE = 0.1
"""Minimum grace period in seconds. A notice without any grace period still counts as a notice."""


def on_drain(agent: AgentState, request: int, message: p.Drain, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if (message.round, message.claim) != agent.seen:
        return [agent.refuse_older(request, message.round)]
    if r is None or r.coordinator is None:
        return [agent.refuse(request, f"{agent.replica} does not coordinate round {message.round}")]
    if r.drain is not None and (r.drain.order.durable or not message.durable):
        return [agent.accept(request)]
    return [agent.accept(request), e.Broadcast(message), *begin(agent, r, message, t)]


def on_termination_notice(agent: AgentState, event: e.TerminationNotice, t: e.Moment) -> list[e.Effect]:
    if agent.notice is not None:
        return []
    agent.notice = Notice(t.now, max(event.grace, LEAST_GRACE))
    effects: list[e.Effect] = []
    if agent.bundled and agent.round is not None and agent.round.failure:
        effects.append(e.SignalWorkers(signal.SIGKILL))
    return [*effects, *own_state.changed(agent, t), *drain_for_notices(agent, t)]


def begin(agent: AgentState, r: Membership, order: p.Drain, t: e.Moment) -> list[e.Effect]:
    over = r.drain is not None and r.drain.grace_over
    r.drain = ActiveDrain(order, t.now + order.grace_seconds, over)
    effects: list[e.Effect] = []
    if not agent.bundled:
        keeps_state = r.workers.keep_state or r.assign.restore.source == p.RestoreSource.MEMORY
        effects += r.stopping.ask(t.now, will_attend=order.durable and keeps_state)
    elif r.workers.alive(0):
        effects.append(e.SendToWorker(0, w.DrainRequest(order.durable)))
    return [*effects, *ship_last(agent, r), *own_state.changed(agent, t)]


def drain_for_notices(agent: AgentState, t: e.Moment) -> list[e.Effect]:
    """Begin a drain (stop all ranks after the same step), because members have termination notices.

    The coordinator (the agent of rank 0) does not wait for the operator, which may be unavailable (decision "The
    coordinator drains by itself"). If all members must depart, the drain saves a checkpoint.
    """
    r = agent.round
    if r is None or r.coordinator is None or not (noticed := r.coordinator.noticed()):
        return []
    durable = len(noticed) == len(r.coordinator.members) and agent.uploads.storage is not None
    if r.drain is not None and (r.drain.order.durable or not durable):
        return []
    if r.coordinator.all_are(p.State.SUCCEEDED) or r.failure is not None:
        return []
    names = ", ".join(list(noticed)[:5])
    grace = max(1.0, min(noticed.values()) - r.workers.save_seconds)
    order = p.Drain(agent.uid, *agent.seen, f"{names} must leave", durable, grace)
    return [e.Broadcast(order), *begin(agent, r, order, t)]


def drain_alone(agent: AgentState, r: Membership, t: e.Moment) -> list[e.Effect]:
    """Stop a user's own command by SIGTERM if its replica has a termination notice but the coordinator is silent.

    The command has the rest of the grace period to exit.

    The coordinator is the agent of rank 0.
    """
    notice = agent.notice
    if agent.bundled or notice is None or r.drain is not None or t.now < notice.patient_until:
        return []
    order = p.Drain(agent.uid, *agent.seen, "the coordinator does not answer", False, notice.until - t.now)
    return [*begin(agent, r, order, t), *r.stopping.stop_at(0)]


def end_of_grace(agent: AgentState, r: Membership, t: e.Moment) -> list[e.Effect]:
    if r.drain is None or r.drain.grace_over or t.now < r.drain.until:
        return []
    r.drain.grace_over = True
    kill: list[e.Effect] = [] if agent.bundled else [e.SignalWorkers(signal.SIGKILL)]
    return [*kill, *own_state.changed(agent, t)]


def ship_last(agent: AgentState, r: Membership) -> list[e.Effect]:
    """Upload the last snapshots of workers that had ended before a checkpoint was requested from them.

    This happens in two cases:
    - A worker had already stopped when a drain requested a checkpoint.
    - A script has finished. The agent knows which step was the last one only when the script ends.

    In a drain, all ranks stop after the same step.
    """
    effects: list[e.Effect] = []
    durable = r.drain is not None and r.drain.order.durable
    if agent.uploads.storage is None:
        return effects
    for rank, last in r.last.items() if r.ends_at is None else ():
        through = not agent.bundled and r.workers.complete(rank)
        if ((durable and r.workers.drained(rank)) or through) and not agent.uploads.is_wanted(last.id, rank):
            agent.uploads.wanted(w.WantDurable(last.id, rank, last.path, complete=False))
            effects.append(e.Ship(last.id, rank, last.path, is_slot=True))
    return effects


def agree_on_the_end(agent: AgentState, r: Membership, coordinator: Coordinator, t: e.Moment) -> list[e.Effect]:
    """Determine the last step of a script, because ranks may have ended with snapshots of different steps.

    Only the coordinator (the agent of rank 0) does this.
    """
    if agent.bundled or agent.state is not OwnState.SUCCEEDED or agent.uploads.storage is None:
        return []
    coordinator.agree_on_the_end(t.now, t.at)
    return end_at(agent, r, coordinator.ends_at)


def end_at(agent: AgentState, r: Membership, step: Optional[int]) -> list[e.Effect]:
    """Upload this agent's shards of the step at which a script has ended on all members.

    Shards that are being uploaded already are left out.
    """
    if step is None or r.ends_at is not None or agent.uploads.storage is None:
        return []
    r.ends_at = step
    effects: list[e.Effect] = []
    for rank, saved in r.saved.items():
        for committed in saved:
            if committed.id.step == step and not agent.uploads.is_coming(committed.id, rank):
                agent.uploads.wanted(w.WantDurable(committed.id, rank, committed.path, complete=False))
                effects.append(e.Ship(committed.id, rank, committed.path, is_slot=True))
    return effects


def forgiven(agent: AgentState, state: p.MemberState) -> p.MemberState:
    """Return a member's state, without a failure that is only a consequence of the drain.

    A drain stops all ranks of a round. With a user's own command, one worker may stop before another one. The second
    worker then loses the connection to the first, and may fail before it receives its own request to stop.
    """
    r, failure = agent.round, state.failure
    if agent.bundled or r is None or r.drain is None or failure is None or failure.reason not in OF_COMMANDS:
        return state
    return dataclasses.replace(state, state=p.State.DRAINED, failure=None)
