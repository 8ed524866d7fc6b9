"""The commit of a claim: members and coordinator, where their state comes from, and the Assigns that follow.

It changes `status.world.claim`, which every status write tests: of two operators that carry on with the same claim only
one can commit it (decision "A claim says whether it is committed").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import concertina_protocol as protocol
from concertina.amounts import amount
from concertina.api.spec import JobSpec
from concertina.api.status import rfc3339, unix_seconds
from concertina.api.world import Base, Claim, Member, World
from concertina.plan.actions import Action, Event, Send
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.state import member_placement, restore, topology
from concertina.plan.state.member_placement import MemberPlace
from concertina_protocol import Prepared
from concertina_protocol.messages.operator_calls import MOST_IMAGES


def commit(
    ctx: JobContext,
    made: Claim,
    replies: Mapping[str, Prepared],
    others: Mapping[str, Prepared],
    leaving: Iterable[str] = (),
) -> Decision:
    """Members and coordinator under the claim, and the Assigns that follow; or why the state to go on from isn't known
    yet. `others`: whom the members reach, and who is none; `leaving`: who was asked as well, and may go now, if it is
    no member."""
    origin = source(ctx, {**replies, **others}, from_storage=made.from_storage)
    if isinstance(origin, restore.Unknown):
        return storage_unknown(origin)
    outside = holders(origin, others, replies)
    places = topology.places(ctx, replies)
    members = _members(ctx, replies, places)
    names = [member.replica for member in members]
    distance = topology.copy_distance(ctx, names, places)
    workers = sum(member.workers for member in members)
    crossing = topology.crossing(ctx, {member.replica: member.workers for member in members})
    world = World(
        round=made.round,
        claim=made.model_copy(update={"committed": True}),
        size=f"{len(members)}/{ctx.spec.replicas}",
        replicas=len(members),
        workers=workers,
        coordinator=members[0].replica,
        members=members,
        layout=topology.layout(ctx.spec, workers),
        cross_domain_groups=crossing,
        copies=distance,
        base=Base(round=made.round, step=origin.step, source=origin.source),
        since=rfc3339(ctx.now),
    )
    is_known = ctx.spec.bundled or origin.source is protocol.RestoreSource.MEMORY
    whence = _whence(origin, ctx.observed.job.uid) if is_known else _anew(ctx)
    message = f"round {made.round} with {amount(len(members), 'replica')} ({amount(workers, 'worker')}) starts {whence}"
    # Conditions report the first round.
    round_event = (Event("Normal", "RoundCommitted", message),) if ctx.status.rounds else ()
    return Decision(
        Phase.RECOVERING if ctx.status.rounds else Phase.STARTING,
        made.reason,
        message,
        world=world,
        replayed=max(0, _reached(ctx) - origin.step) if ctx.spec.bundled else 0,
        actions=_assigns(ctx, world, replies, _held_by(origin, {*names, *outside}), outside, leaving),
        events=(*round_event, *topology.copy_events(ctx, names, places, distance), *_crossing_event(ctx, crossing)),
        recheck=constants.ACKNOWLEDGE,
    )


def _reached(ctx: JobContext) -> int:
    """Steps finished by the last round. Of one that ended before its first word no more than it began with: what was
    lost before that was counted when it began."""
    base = ctx.world.base
    if base is None or ctx.status.internal.round_waits.round == base.round:
        return ctx.round.step
    return base.step


def _whence(origin: protocol.Restore, uid: str) -> str:
    if origin.durable and origin.bars(origin.durable, uid):
        return f"from the newest checkpoint of step {origin.step} or before"
    return {
        protocol.RestoreSource.FRESH: "from the beginning",
        protocol.RestoreSource.MEMORY: f"from the snapshot of step {origin.step}",
        protocol.RestoreSource.STORAGE: f"from the checkpoint of step {origin.step}",
    }[origin.source]


def _anew(ctx: JobContext) -> str:
    """Where a command of one's own goes on from is its own affair."""
    if not ctx.status.rounds:
        return "the command"
    return "the command anew, which goes on from its own checkpoint if it keeps one"


def source(
    ctx: JobContext, replies: Mapping[str, Prepared], from_storage: bool = False
) -> protocol.Restore | restore.Unknown:
    """Where a round of these would go on from."""
    storages = [_storage(ctx, name, reply) for name, reply in replies.items()]
    return restore.choose({} if from_storage else replies, storages, ctx.status, ctx.observed.job.uid, ctx.spec)


def holders(
    source: protocol.Restore, others: Mapping[str, Prepared], here: Mapping[str, Prepared]
) -> dict[str, Prepared]:
    """As few of those others as hold together what those here lack."""
    needed: dict[str, Prepared] = {}
    for names in source.holders.values():
        if not any(name in here or name in needed for name in names):
            needed[names[0]] = others[names[0]]
    return needed


def _held_by(source: protocol.Restore, names: Collection[str]) -> protocol.Restore:
    """As if nobody else held anything."""
    held = {shard: tuple(name for name in holders if name in names) for shard, holders in source.holders.items()}
    return replace(source, holders=held)


def _crossing_event(ctx: JobContext, crossing: str | None) -> tuple[Event, ...]:
    """Once, not in every round."""
    if crossing is None or crossing == ctx.world.cross_domain_groups:
        return ()
    advice = (
        "they wait for that link in every layer; nodes of whole groups in each domain would keep them apart from it"
    )
    return (Event("Warning", "GroupsCrossDomains", f"{crossing}: {advice}"),)


def storage_unknown(why: restore.Unknown) -> Decision:
    if not why.error:
        message = "waits for a first look into durable storage, to know where to go on from"
        return Decision(Phase.STARTING, "AskingStorage", message, recheck=constants.RETRY, watch_all=True)
    message = f"durable storage can't be used, so nothing is started: {why.error}"
    return Decision(
        Phase.STALLED,
        "StorageUnavailable",
        message,
        stalled="StorageUnavailable",
        stalled_message=message,
        recheck=5.0,
        watch_all=True,
    )


def _storage(ctx: JobContext, name: str, reply: Prepared) -> protocol.Storage | None:
    """What the agent last said: on its stream, if it is open, or when it was prepared."""
    view = ctx.agent(name)
    fresh = view.report.storage if view.connected and view.report and view.report.instance == reply.instance else None
    return fresh or reply.storage


def _members(ctx: JobContext, replies: Mapping[str, Prepared], places: Mapping[str, MemberPlace]) -> tuple[Member, ...]:
    """In order of rank."""
    return tuple(
        Member(
            replica=name,
            uid=ctx.replicas.pods[name].uid,
            instance=replies[name].instance,
            node=ctx.replicas.pods[name].node,
            workers=replies[name].workers,
        )
        for name in _ranked(ctx, replies, places)
    )


def _ranked(ctx: JobContext, replies: Mapping[str, Prepared], places: Mapping[str, MemberPlace]) -> tuple[str, ...]:
    """In a world of blocks who has which rank matters most. Elsewhere the copies do, and the old coordinator is first
    where it takes part (its store and links are warm)."""
    names = sorted(replies, key=lambda name: ctx.replicas.pods[name].order)
    if ctx.spec.group_sizes:
        return topology.ranked(ctx, names)
    coordinator = ctx.world.coordinator or ""
    if coordinator not in replies:
        coordinator = next((name for name in replies if name in ctx.round.members), next(iter(replies)))
    return member_placement.order({name: places[name] for name in names}, coordinator, tuple(ctx.round.members))


def _assigns(
    ctx: JobContext,
    world: World,
    replies: Mapping[str, Prepared],
    source: protocol.Restore,
    outside: Mapping[str, Prepared],
    leaving: Iterable[str],
) -> tuple[Action, ...]:
    ranks, first_rank = [], 0
    for member in world.members:
        ranks.append(_peer(ctx, member.replica, member.instance, first_rank, member.workers))
        first_rank += member.workers
    claim_id = world.claim.claim_id if world.claim else ""
    store = replies[world.members[0].replica].store
    images = sorted({ctx.replicas.pods[member.replica].image for member in world.members} - {""})
    message = protocol.Assign(
        ctx.observed.job.uid, world.round, claim_id, tuple(ranks), store, source, _limits(ctx.spec), _history(ctx),
        tuple(images[:MOST_IMAGES]),
        tuple(_peer(ctx, name, reply.instance, 0, 0) for name, reply in outside.items()),
        ctx.observed.uri_sharing,
    )  # fmt: skip
    # Who still has to give something is not told that it may go.
    receivers = dict.fromkeys(
        [*(member.replica for member in ranks), *(name for name in leaving if name not in outside)]
    )
    return tuple(Send(name, ctx.replicas.address(name), message) for name in receivers)


def _peer(ctx: JobContext, replica: str, instance: str, first_rank: int, workers: int) -> protocol.Member:
    pod = ctx.replicas.pods[replica]
    node = ctx.node(pod)
    return protocol.Member(replica, instance, ctx.replicas.address(replica), first_rank, workers, pod.node, node.zone)


def _history(ctx: JobContext) -> protocol.JobHistory:
    since = ctx.status.start_time
    return protocol.JobHistory(ctx.now - unix_seconds(since) if since else 0.0, ctx.status.restarts.total)


def _limits(spec: JobSpec) -> protocol.Limits:
    """What the coordinator is told to look out for."""
    policy = spec.failure_policy
    seconds = policy.hang_timeout_seconds
    return protocol.Limits(None if seconds is None else float(seconds), constants.STRAGGLER_FACTOR)
