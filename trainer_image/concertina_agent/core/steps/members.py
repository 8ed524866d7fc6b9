"""Between the lead and its members."""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.lead import Lead
from concertina_agent.core.round.membership import Membership
from concertina_agent.core.states import OVER, OwnState
from concertina_agent.core.steps import drains, own_state, storage, workers
from concertina_protocol import worker_channel as w


def on_save(agent: AgentState, request: int, message: p.Save, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if (message.round, message.claim) != agent.seen:
        return [agent.refuse_older(request, message.round)]
    if r is None or r.lead is None:
        return [agent.refuse(request, f"{agent.replica} does not lead round {message.round}")]
    save: list[e.Effect] = [e.SendToWorker(0, w.SaveNow())] if r.workers.keep_state and r.drain is None else []
    return [agent.accept(request), *save]


def on_join(agent: AgentState, request: int, message: p.Join, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if (message.round, message.claim) != agent.seen or r is None or r.lead is None:
        return [agent.refuse(request, f"{agent.replica} does not lead round {message.round} (yet)")]
    if refusal := r.lead.join(message, t.now):
        return [agent.refuse(request, refusal)]
    effects: list[e.Effect] = [agent.accept(request)]
    if r.drain is not None:
        effects.append(e.Broadcast(r.drain.order, only=message.replica))
        if r.stopping.call is not None:
            effects.append(e.Broadcast(p.StopAt(r.stopping.call), only=message.replica))
    if r.published is not None:  # a member that joins again may have missed it
        effects.append(e.Broadcast(p.DurableMoved(r.published), only=message.replica))
    return effects


def on_ping(agent: AgentState, request: int, message: p.Ping, t: e.Moment) -> list[e.Effect]:
    return [agent.accept(request)]


# --- on the lead ----------------------------------------------------------------------------------------------------


def on_member_message(agent: AgentState, event: e.MemberMessage, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if r is None or r.lead is None or not r.lead.on_member_state(drains.forgiven(agent, event.state), t.now):
        return []
    return [
        e.ReportChanged(),
        *own_state.publish(r.lead),
        *own_state.agree_where_to_stop(r, r.lead, t),
        *drains.drain_for_notices(agent, t),
    ]


def on_member_gone(agent: AgentState, event: e.MemberGone, t: e.Moment) -> list[e.Effect]:
    lead = agent.round.lead if agent.round else None
    if lead is None or (event.round, event.claim) != agent.seen:
        return []
    lost = lead.lost(event.replica, event.detail or "closed its connection to the lead", t.at)
    return [e.ReportChanged()] if lost else []


def check_members(agent: AgentState, r: Membership, lead: Lead, t: e.Moment) -> list[e.Effect]:
    """On each tick: who is lost, what has failed, and whether the round hangs."""
    overdue = lead.overdue(t.now)
    for replica, detail in overdue:
        lead.lost(replica, detail, t.at)
    if agent.state is OwnState.SUCCEEDED and not agent.is_durable(r, lead, OwnState.SUCCEEDED):
        for replica in lead.gone_unshipped(agent.last_step(r)):  # of the last checkpoint: it will never come
            lead.lost_part(replica, t.at)
    ends = drains.agree_on_the_end(agent, r, lead, t)
    settled = lead.settle(t.now)
    lead.on_member_state(agent.member_state(), t.now)
    news = lead.check(t.now) or settled or bool(overdue)
    return [
        *ends,
        *([e.ReportChanged()] if news else []),
        *workers.collect_stacks(r, lead.watchdog.hung),
        *own_state.agree_where_to_stop(r, lead, t),
    ]


# --- on members -----------------------------------------------------------------------------------------------------


def on_lead_joined(agent: AgentState, event: e.LeadJoined, t: e.Moment) -> list[e.Effect]:
    if agent.round is None or (event.round, event.claim) != agent.seen:
        return []
    agent.round.silent_at = t.now + p.SILENCE_SECONDS
    return [e.ReportChanged()]


def on_lead_message(agent: AgentState, event: e.LeadMessage, t: e.Moment) -> list[e.Effect]:
    r, message = agent.round, event.message
    if r is None or r.lead is not None or (event.round, event.claim) != agent.seen:
        return []
    r.silent_at = t.now + p.SILENCE_SECONDS
    if isinstance(message, p.Drain):
        return [] if r.drain is not None and r.drain.order == message else drains.begin(agent, r, message, t)
    if isinstance(message, p.StopAt):
        return r.stopping.stop_at(message.call)
    if isinstance(message, p.DurableMoved):
        return storage.durable_moved(agent, message.durable, t)
    r.leaving = message.leaving
    if message.state == p.State.SUCCEEDED and r.succeeded_at is None:
        r.succeeded_at = t.now
    dropped = storage.complete_on_peers(agent, r, message.snapshot_step)
    return [*dropped, *drains.end_at(agent, r, message.ends_at), *workers.collect_stacks(r, message.hung)]


def on_lead_gone(agent: AgentState, event: e.LeadGone, t: e.Moment) -> list[e.Effect]:
    if (event.round, event.claim) != agent.seen:
        return []
    return lead_lost(agent, event.detail or "closed the connection", t)


def lead_lost(agent: AgentState, detail: str, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if r is None or r.lead is not None:
        return []
    r.lead_gone = True
    if agent.state in OVER:
        return []
    lead = r.assign.members[0].replica
    failure = p.Failure(
        agent.replica, p.FailureReason.LEAD_LOST, f"The lead {lead} {detail}.", step=r.workers.step, at=t.at
    )
    return own_state.fail(agent, failure, t)
