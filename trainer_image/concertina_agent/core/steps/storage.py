"""Handlers of events about snapshots: which ones to keep, and which are in durable storage.

A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.membership import Membership
from concertina_agent.core.steps import own_state
from concertina_protocol import worker_channel as w


def keep_state(agent: AgentState, r: Membership) -> list[e.Effect]:
    """Begin to copy a script's snapshots to another replica and to upload its checkpoints.

    The bundled trainer always saves snapshots. For a user's script, copies and uploads begin only when the script sends
    the message KeepsState.
    """
    if agent.bundled or r.copying:
        return []
    use: list[e.Effect] = [e.UseStorage()] if agent.uploads.use() else []
    return [*use, *copy_neighbour(r), e.ReportChanged()]


def copy_neighbour(r: Membership) -> list[e.Effect]:
    """Begin to copy the snapshots of the previous member to this replica.

    The members form a ring, in which each member copies the previous member's shards.
    """
    r.copying = True
    if r.lonely:
        return []
    before = r.assign.members[r.me - 1]
    shards = tuple(range(before.first_rank, before.first_rank + before.workers))
    return [e.CopyFrom(r.assign.round, before, shards)]


def on_peer_copied(agent: AgentState, event: e.PeerCopied, t: e.Moment) -> list[e.Effect]:
    r = agent.current(event.id.round)
    if r is None or r.has_copied(event.shard, event.id.step):
        return []
    r.copied[event.shard] = event.id.step
    effects: list[e.Effect] = [e.SendToWorker(event.shard, w.CopiedUpTo(event.id.step))]
    return effects if r.drain is None else [*effects, *own_state.changed(agent, t)]


def on_copy_held(agent: AgentState, event: e.CopyHeld, t: e.Moment) -> list[e.Effect]:
    if agent.current(event.id.round) is not None:
        agent.snapshots.copied(event.id, event.shard)
    return []


def restored(agent: AgentState, r: Membership, step: int) -> list[e.Effect]:
    """Delete the older snapshots that were kept in case a rank could not restore the state of this round.

    Once a step has finished, all ranks have restored their state, because all of them take part in each step.
    """
    restore = r.assign.restore
    if restore.source == p.RestoreSource.FRESH or step <= restore.step or r.restored:
        return []
    r.restored = True
    return [e.DropSnapshots(agent.snapshots.keep(r.assign.round, restore.id))]


def complete_on_peers(agent: AgentState, r: Membership, step: Optional[int]) -> list[e.Effect]:
    """Delete the snapshots of older rounds, once all shards of a snapshot of this round have a copy on another replica.

    `step` is the step of the newest such snapshot, or None if there is none.
    """
    if step is None or step <= r.assign.restore.step:
        return []
    older = agent.snapshots.keep(r.assign.round)
    return [e.DropSnapshots(older)] if older else []


def undo(agent: AgentState, undone: tuple[p.Undone, ...]) -> list[e.Effect]:
    """Record the states that rollbacks have undone, and ensure that LATEST names none of these states.

    LATEST is the file in storage that names the checkpoint from which a job continues.
    """
    if agent.uploads.storage is None:
        return []
    agent.uploads.undone += tuple(rollback for rollback in undone if rollback not in agent.uploads.undone)
    return [e.Undo(rollback) for rollback in undone]


def on_part_shipped(agent: AgentState, event: e.PartShipped, t: e.Moment) -> list[e.Effect]:
    if agent.current(event.part.id.round) is None:
        return []
    agent.uploads.shipped(event.part)
    return own_state.changed(agent, t)


def on_publish_done(agent: AgentState, event: e.PublishDone, t: e.Moment) -> list[e.Effect]:
    r = agent.current(event.id.round)
    if r is None:
        # The publication ended after its round. No agent has recorded yet that LATEST has moved.
        return [e.ProbeStorage()] if event.durable is not None else []
    if event.durable is not None:
        r.published = event.durable
        return [e.Broadcast(p.DurableMoved(event.durable)), *durable_moved(agent, event.durable, t)]
    if agent.uploads.voids(event.id.round, event.id.step):
        return []  # storage refused an outdated checkpoint, as it should
    return on_storage_seen(agent, e.StorageSeen(p.Storage(p.StorageHealth.ERROR, None, event.message)), t)


def durable_moved(agent: AgentState, durable: p.Durable, t: e.Moment) -> list[e.Effect]:
    agent.uploads.moved(durable, agent.seen[0])
    return own_state.changed(agent, t)


def on_storage_seen(agent: AgentState, event: e.StorageSeen, t: e.Moment) -> list[e.Effect]:
    return [e.ReportChanged()] if agent.uploads.seen(event.storage, agent.seen[0]) else []
