"""What this agent says of itself is new: what follows on a lead, which is a member of its own round too."""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.lead import Lead
from concertina_agent.core.round.membership import Membership


def changed(agent: AgentState, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if r is None or r.lead is None:
        return [e.ReportChanged()]
    r.lead.on_member_state(agent.member_state(), t.now)
    return [e.ReportChanged(), *publish(r.lead), *agree_where_to_stop(r, r.lead, t)]


def fail(agent: AgentState, failure: p.Failure, t: e.Moment) -> list[e.Effect]:
    """This agent's part in the round has failed."""
    if agent.round is None:
        return []
    agent.round.fail(failure)
    return changed(agent, t)


def publish(lead: Lead) -> list[e.Effect]:
    """Whatever has all its parts in storage by now."""
    return [e.Publish(id, complete) for id, complete in lead.publishable()]


def agree_where_to_stop(r: Membership, lead: Lead, t: e.Moment) -> list[e.Effect]:
    call = r.stopping.decide(lead.members.values(), t.now)
    return [] if call is None else [e.Broadcast(p.StopAt(call)), *r.stopping.stop_at(call)]
