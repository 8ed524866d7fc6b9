"""Handlers of events between the coordinator (the agent of rank 0) and its members."""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.coordinator import Coordinator
from concertina_agent.core.round.membership import Membership
from concertina_agent.core.states import OVER, OwnState
from concertina_agent.core.steps import draining, own_state, storage, worker_steps
from concertina_protocol import worker_channel as w


def on_save(agent: AgentState, request: int, message: p.Save, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if (message.round, message.claim) != agent.seen:
        return [agent.refuse_older(request, message.round)]
    if r is None or r.coordinator is None:
        return [agent.refuse(request, f"{agent.replica} does not coordinate round {message.round}")]
    save: list[e.Effect] = [e.SendToWorker(0, w.SaveNow())] if r.workers.keep_state and r.drain is None else []
    return [agent.accept(request), *save]


def on_join(agent: AgentState, request: int, message: p.Join, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if (message.round, message.claim) != agent.seen or r is None or r.coordinator is None:
        return [agent.refuse(request, f"{agent.replica} does not coordinate round {message.round} (yet)")]
    if refusal := r.coordinator.join(message, t.now):
        return [agent.refuse(request, refusal)]
    effects: list[e.Effect] = [agent.accept(request)]
    if r.drain is not None:
        effects.append(e.Broadcast(r.drain.order, only=message.replica))
        if r.stopping.call is not None:
            effects.append(e.Broadcast(p.StopAt(r.stopping.call), only=message.replica))
    if r.published is not None:  # the member may have missed this message before it joined again
        effects.append(e.Broadcast(p.DurableMoved(r.published), only=message.replica))
    return effects


def on_ping(agent: AgentState, request: int, message: p.Ping, t: e.Moment) -> list[e.Effect]:
    return [agent.accept(request)]


# --- on the coordinator
# ----------------------------------------------------------------------------------------------------


def on_member_message(agent: AgentState, event: e.MemberMessage, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if (
        r is None
        or r.coordinator is None
        or not r.coordinator.on_member_state(draining.forgiven(agent, event.state), t.now)
    ):
        return []
    return [
        e.ReportChanged(),
        *own_state.publish(r.coordinator),
        *own_state.agree_where_to_stop(r, r.coordinator, t),
        *draining.drain_for_notices(agent, t),
    ]


def on_member_gone(agent: AgentState, event: e.MemberGone, t: e.Moment) -> list[e.Effect]:
    coordinator = agent.round.coordinator if agent.round else None
    if coordinator is None or (event.round, event.claim) != agent.seen:
        return []
    lost = coordinator.lost(event.replica, event.detail or "closed its connection to the coordinator", t.at)
    return [e.ReportChanged()] if lost else []


def check_members(agent: AgentState, r: Membership, coordinator: Coordinator, t: e.Moment) -> list[e.Effect]:
    """Check, at each tick, which members are lost, which workers have failed, and whether the round hangs."""
    overdue = coordinator.overdue(t.now)
    for replica, detail in overdue:
        coordinator.lost(replica, detail, t.at)
    if agent.state is OwnState.SUCCEEDED and not agent.is_durable(r, coordinator, OwnState.SUCCEEDED):
        # The shards of these members for the last checkpoint will never arrive.
        for replica in coordinator.gone_unshipped(agent.last_step(r)):
            coordinator.lost_part(replica, t.at)
    ends = draining.agree_on_the_end(agent, r, coordinator, t)
    settled = coordinator.settle(t.now)
    coordinator.on_member_state(agent.member_state(), t.now)
    silent = coordinator.doubt(t.now)
    news = coordinator.check(t.now) or settled or silent or bool(overdue)
    return [
        *ends,
        *([e.ReportChanged()] if news else []),
        *worker_steps.collect_stacks(r, coordinator.watchdog.hung),
        *own_state.agree_where_to_stop(r, coordinator, t),
    ]


# --- on members -----------------------------------------------------------------------------------------------------


def on_coordinator_joined(agent: AgentState, event: e.CoordinatorJoined, t: e.Moment) -> list[e.Effect]:
    if agent.round is None or (event.round, event.claim) != agent.seen:
        return []
    agent.round.silent_at = t.now + p.SILENCE_SECONDS
    return [e.ReportChanged()]


def on_coordinator_message(agent: AgentState, event: e.CoordinatorMessage, t: e.Moment) -> list[e.Effect]:
    r, message = agent.round, event.message
    if r is None or r.coordinator is not None or (event.round, event.claim) != agent.seen:
        return []
    r.silent_at = t.now + p.SILENCE_SECONDS
    if isinstance(message, p.Drain):
        return [] if r.drain is not None and r.drain.order == message else draining.begin(agent, r, message, t)
    if isinstance(message, p.StopAt):
        return r.stopping.stop_at(message.call)
    if isinstance(message, p.DurableMoved):
        return storage.durable_moved(agent, message.durable, t)
    r.leaving = message.leaving
    if message.state == p.State.SUCCEEDED and r.succeeded_at is None:
        r.succeeded_at = t.now
    dropped = storage.complete_on_peers(agent, r, message.snapshot_step)
    return [*dropped, *draining.end_at(agent, r, message.ends_at), *worker_steps.collect_stacks(r, message.hung)]


def on_coordinator_gone(agent: AgentState, event: e.CoordinatorGone, t: e.Moment) -> list[e.Effect]:
    if (event.round, event.claim) != agent.seen:
        return []
    return coordinator_lost(agent, event.detail or "closed the connection", t)


def coordinator_lost(agent: AgentState, detail: str, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if r is None or r.coordinator is not None:
        return []
    r.coordinator_gone = True
    if agent.state in OVER:
        return []
    coordinator = r.assign.members[0].replica
    failure = p.Failure(
        agent.replica,
        p.FailureReason.COORDINATOR_LOST,
        f"The coordinator {coordinator} {detail}.",
        step=r.workers.step,
        at=t.at,
    )
    return own_state.fail(agent, failure, t)
