"""Handlers of the messages with which a round begins: Prepare, Assign and Release.

A round is a period in which a fixed set of replicas trains. Prepare ends older rounds, and the answer contains this
agent's state. Assign begins the round. Release tells a departing replica that the round does not need its state.
"""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round import probes
from concertina_agent.core.round.coordinator import Coordinator, join_seconds
from concertina_agent.core.round.membership import Membership, Preparation
from concertina_agent.core.round.workers_state import Workers
from concertina_agent.core.steps import own_state, storage


def on_prepare(agent: AgentState, request: int, message: p.Prepare, t: e.Moment) -> list[e.Effect]:
    if not agent.is_current_or_higher(message.round, message.claim):
        return [agent.refuse_older(request, message.round)]
    preparation = agent.preparation
    if preparation is None or agent.seen != (message.round, message.claim):
        return _prepare_anew(agent, request, message)
    if preparation.answer is not None and (preparation.prepare == message or agent.round is not None):
        return [e.Reply(request, preparation.answer)]
    preparation.waiting.append(request)
    if preparation.prepare == message:
        return []
    preparation.prepare, preparation.reachable, preparation.answer = message, None, None
    preparation.asked = probes.chosen(message.candidates, agent.replica)
    return [e.PingPeers(message, preparation.asked)]


def _prepare_anew(agent: AgentState, request: int, message: p.Prepare) -> list[e.Effect]:
    abandoned = agent.preparation.waiting if agent.preparation else []
    agent.seen = (message.round, message.claim)
    pinged_candidates = probes.chosen(message.candidates, agent.replica)
    agent.preparation, agent.round = Preparation(message, pinged_candidates, [request]), None
    effects: list[e.Effect] = [agent.refuse_older(waiting, 0) for waiting in abandoned]
    effects += [
        e.PersistSeen(message.round, message.claim),
        e.KillWorkers(message.round),
        e.BindStore(message.round, message.claim),
        e.PingPeers(message, pinged_candidates),
        e.ReportChanged(),
    ]
    if agent.uploads.outdated(message.round):
        effects.append(e.ProbeStorage())
    return effects


def on_workers_gone(agent: AgentState, event: e.WorkersGone, t: e.Moment) -> list[e.Effect]:
    if event.round != agent.seen[0] or agent.preparation is None or agent.preparation.gone:
        return []
    if event.held is not None:
        agent.snapshots.replace(event.held)
    agent.preparation.gone, agent.preparation.replaced = True, tuple(dict.fromkeys(event.replaced))
    return _answer_when_ready(agent, agent.preparation)


def on_store_bound(agent: AgentState, event: e.StoreBound, t: e.Moment) -> list[e.Effect]:
    if (event.round, event.claim) != agent.seen or agent.preparation is None:
        return []
    agent.preparation.store = event.address
    return _answer_when_ready(agent, agent.preparation)


def on_reached(agent: AgentState, event: e.Reached, t: e.Moment) -> list[e.Effect]:
    if agent.preparation is None or event.prepare != agent.preparation.prepare:
        return []
    agent.preparation.reachable = event.replicas
    return _answer_when_ready(agent, agent.preparation)


def _answer_when_ready(agent: AgentState, preparation: Preparation) -> list[e.Effect]:
    if (
        not preparation.gone
        or preparation.store is None
        or preparation.reachable is None
        or preparation.answer is not None
    ):
        return []
    absent = tuple(
        candidate.replica for candidate in preparation.asked if candidate.replica not in preparation.reachable
    )
    preparation.answer = p.Prepared(
        agent.replica,
        agent.instance,
        *agent.seen,
        agent.workers_here,
        preparation.store,
        preparation.reachable,
        agent.held,
        agent.uploads.storage,
        unreachable=None if len(preparation.asked) == len(preparation.prepare.candidates) else absent,
        replaced=preparation.replaced,
        ready=agent.can_start,
    )
    effects: list[e.Effect] = [e.Reply(request, preparation.answer) for request in preparation.waiting]
    preparation.waiting.clear()
    return effects


def on_assign(agent: AgentState, request: int, message: p.Assign, t: e.Moment) -> list[e.Effect]:
    if (message.round, message.claim) != agent.seen:
        return [agent.refuse_older(request, message.round)]
    if agent.round is not None:
        if agent.round.assign == message:
            return [agent.accept(request)]
        return [agent.refuse(request, f"round {message.round} was already assigned here with other contents")]
    if agent.preparation is None or not agent.preparation.quiet:
        return [agent.refuse(request, f"this instance of the agent has not prepared round {message.round}")]
    own_index = next((i for i, m in enumerate(message.members) if m.replica == agent.replica), None)
    if own_index is None or message.members[own_index].instance != agent.instance:
        identity = f"{agent.replica} ({agent.instance})"
        return [agent.refuse(request, f"{identity} is not a member of round {message.round}")]
    return [agent.accept(request), *_begin(agent, message, own_index, t)]


def on_release(agent: AgentState, request: int, message: p.Release, t: e.Moment) -> list[e.Effect]:
    if (message.round, message.claim) != agent.seen:
        return [agent.refuse_older(request, message.round)]
    if agent.round is not None or agent.preparation is None:
        return [agent.refuse(request, f"{agent.replica} is a member of round {message.round}")]
    agent.preparation.released = True
    return [agent.accept(request)]


def _begin(agent: AgentState, message: p.Assign, me: int, t: e.Moment) -> list[e.Effect]:
    own_member = message.members[me]
    ranks = tuple(range(own_member.first_rank, own_member.first_rank + own_member.workers))
    coordinator = Coordinator(message, t.now) if me == 0 else None
    agent.uploads.new_round(message.round, message.restore.all_undone)
    agent.round = Membership(
        message, me, Workers(ranks, agent.bundled), coordinator, t.now + join_seconds(len(message.members))
    )
    effects: list[e.Effect] = []
    restore, snapshot_index = message.restore, agent.snapshots
    if unneeded := snapshot_index.keep(message.round, restore.id, snapshot_index.before(message.round, restore)):
        effects.append(e.DropSnapshots(unneeded))
    if coordinator is not None:
        effects += storage.undo(agent, message.restore.all_undone)
    effects.append(e.StartRound(message, me))
    if agent.bundled:
        effects += storage.copy_neighbour(agent.round)
    return [*effects, *own_state.changed(agent, t)]
