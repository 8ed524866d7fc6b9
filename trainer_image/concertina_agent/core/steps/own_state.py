"""Effects of a change of this agent's own state.

The coordinator (the agent of rank 0) is also a member of its round, a period in which a fixed set of replicas trains.
The coordinator therefore also processes its own state like the state of any other member.
"""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.coordinator import Coordinator
from concertina_agent.core.round.membership import Membership


def changed(agent: AgentState, t: e.Moment) -> list[e.Effect]:
    r = agent.round
    if r is None or r.coordinator is None:
        return [e.ReportChanged()]
    r.coordinator.on_member_state(agent.member_state(), t.now)
    return [e.ReportChanged(), *publish(r.coordinator), *agree_where_to_stop(r, r.coordinator, t)]


def fail(agent: AgentState, failure: p.Failure, t: e.Moment) -> list[e.Effect]:
    """Record that this agent's part in the round has failed."""
    if agent.round is None:
        return []
    agent.round.fail(failure)
    return changed(agent, t)


def publish(coordinator: Coordinator) -> list[e.Effect]:
    """Return the effects that publish, as checkpoints, all snapshots whose shards are now in storage."""
    return [e.Publish(id, complete) for id, complete in coordinator.publishable()]


def agree_where_to_stop(r: Membership, coordinator: Coordinator, t: e.Moment) -> list[e.Effect]:
    call = r.stopping.decide(coordinator.members.values(), t.now)
    return [] if call is None else [e.Broadcast(p.StopAt(call)), *r.stopping.stop_at(call)]
