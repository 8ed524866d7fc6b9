"""Commit a claim: choose members, coordinator and the state to start from, and send the Assign calls.

A round is a period in which a fixed set of replicas trains. A claim is the operator's decision to begin a round. A
commit changes `status.world.claim`, and every status write tests that value. If two operators work on the same claim,
only one of them can commit it (decision "Status writes test whether the claim is committed").

The coordinator is the agent of rank 0.
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
    claim: Claim,
    replies: Mapping[str, Prepared],
    others: Mapping[str, Prepared],
    leaving: Iterable[str] = (),
) -> Decision:
    """Commit the claim, which fixes the round's members, and give the members their ranks with Assign calls.

    If the state to start from is not known yet, the decision reports the reason instead.

    Args:
        ctx: Context of this planning pass.
        claim: Claim of the round. It is not committed yet.
        replies: Answers of the replicas that become members.
        others: Answers of other replicas that the members can reach.
        leaving: Departing replicas that were asked too. Those that do not become members may exit now.
    """
    origin = source(ctx, {**replies, **others}, from_storage=claim.from_storage)
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
        round=claim.round,
        claim=claim.model_copy(update={"committed": True}),
        size=f"{len(members)}/{ctx.wanted_spec.replicas}",
        replicas=len(members),
        workers=workers,
        coordinator=members[0].replica,
        members=members,
        layout=topology.layout(ctx.spec, workers),
        cross_domain_groups=crossing,
        copies=distance,
        base=Base(round=claim.round, step=origin.step, source=origin.source),
        since=rfc3339(ctx.now),
    )
    is_known = ctx.spec.bundled or origin.source is protocol.RestoreSource.MEMORY
    whence = _whence(origin, ctx.observed.job.uid) if is_known else _anew(ctx)
    message = (
        f"round {claim.round} with {amount(len(members), 'replica')} ({amount(workers, 'worker')}) starts {whence}"
    )
    # The job's conditions report the first round.
    round_event = (Event("Normal", "RoundCommitted", message),) if ctx.status.rounds else ()
    return Decision(
        Phase.RECOVERING if ctx.status.rounds else Phase.STARTING,
        claim.reason,
        message,
        world=world,
        replayed=max(0, _reached(ctx) - origin.step) if ctx.spec.bundled else 0,
        actions=(
            *_assigns(ctx, world, replies, _held_by(origin, {*names, *outside}), outside),
            *release(ctx, claim, [name for name in leaving if name not in names and name not in outside]),
        ),
        events=(*round_event, *topology.copy_events(ctx, names, places, distance), *_crossing_event(ctx, crossing)),
        recheck=constants.ACKNOWLEDGE,
    )


def _reached(ctx: JobContext) -> int:
    """Return the step that the last round reached. The number of lost steps is computed from it.

    If the last round ended before its first report, the result is the step from which that round started. The status
    may then contain a higher step of an earlier round. The steps in between were already counted as lost when the last
    round began.
    """
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
    """Return a phrase, for a message, on the state from which a custom command starts.

    The phrase contains no step, because the command chooses its state itself and the operator does not know it.
    """
    if not ctx.status.rounds:
        return "the command"
    return "the command again, which continues from its own checkpoint if it has one"


def source(
    ctx: JobContext, replies: Mapping[str, Prepared], from_storage: bool = False
) -> protocol.Restore | restore.Unknown:
    """Return the state from which a round of the replicas in `replies` would start."""
    storages = [_storage(ctx, name, reply) for name, reply in replies.items()]
    return restore.choose({} if from_storage else replies, storages, ctx.status, ctx.observed.job.uid, ctx.spec)


def holders(
    source: protocol.Restore, replies_of_others: Mapping[str, Prepared], member_replies: Mapping[str, Prepared]
) -> dict[str, Prepared]:
    """Return the answers of a small set of replicas outside of the round that have all shards that no member has.

    The replicas are chosen from `replies_of_others`. The shards are those of the state `source`.
    """
    needed: dict[str, Prepared] = {}
    for names in source.holders.values():
        if not any(name in member_replies or name in needed for name in names):
            needed[names[0]] = replies_of_others[names[0]]
    return needed


def _held_by(source: protocol.Restore, names: Collection[str]) -> protocol.Restore:
    """Return the restore instruction `source`, with only the replicas in `names` listed as holders of shards.

    Members fetch shards from the listed replicas, so replicas that the round does not use must not be listed.
    """
    holders_by_shard = {
        shard: tuple(name for name in holders if name in names) for shard, holders in source.holders.items()
    }
    return replace(source, holders=holders_by_shard)


def _crossing_event(ctx: JobContext, crossing: str | None) -> tuple[Event, ...]:
    """Return an event if process groups span several network domains.

    The result is empty if the same groups were reported before.
    """
    if crossing is None or crossing == ctx.world.cross_domain_groups:
        return ()
    advice = "they wait for that link in every layer; to avoid this, have nodes for whole groups in each domain"
    return (Event("Warning", "GroupsCrossDomains", f"{crossing}: {advice}"),)


def storage_unknown(why: restore.Unknown) -> Decision:
    if not why.error:
        message = "waits for the first read of durable storage, which shows where to continue"
        return Decision(Phase.STARTING, "AskingStorage", message, recheck=constants.RETRY, watch_all=True)
    message = f"durable storage can't be used, so training does not start: {why.error}"
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
    """Return the last known report of a replica's agent about durable storage; None if there is none.

    If the operator has an open report stream from the agent, the last report of that stream is the newest. Otherwise
    the function uses the agent's answer (`reply`) to the Prepare call, which asks the replica to join the next round.
    """
    view = ctx.agent(name)
    fresh = view.report.storage if view.connected and view.report and view.report.instance == reply.instance else None
    return fresh or reply.storage


def _members(ctx: JobContext, replies: Mapping[str, Prepared], places: Mapping[str, MemberPlace]) -> tuple[Member, ...]:
    """Return the entries of the round's members for `status.world`, in order of rank."""
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
    """Return the names of the members in order of rank.

    In jobs with parallel groups of fixed size, the ranks follow the network topology. In other jobs, the ranks are
    chosen so that copies of snapshots are on other nodes or zones. If the coordinator of the last round is a member, it
    keeps rank 0, because its store and connections already exist.
    """
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
    return tuple(Send(member.replica, member.address, message) for member in ranks)


def release(ctx: JobContext, claim: Claim, names: Iterable[str]) -> tuple[Action, ...]:
    """Return the Release calls, which allow departing replicas to exit.

    The next round, which begins with `claim`, does not need the state of these replicas.
    """
    message = protocol.Release(ctx.observed.job.uid, claim.round, claim.claim_id)
    return tuple(Send(name, ctx.replicas.address(name), message) for name in names)


def _peer(ctx: JobContext, replica: str, instance: str, first_rank: int, workers: int) -> protocol.Member:
    pod = ctx.replicas.pods[replica]
    node = ctx.node(pod)
    return protocol.Member(replica, instance, ctx.replicas.address(replica), first_rank, workers, pod.node, node.zone)


def _history(ctx: JobContext) -> protocol.JobHistory:
    since = ctx.status.start_time
    return protocol.JobHistory(ctx.now - unix_seconds(since) if since else 0.0, ctx.status.restarts.total)


def _limits(spec: JobSpec) -> protocol.Limits:
    """Return the limits with which the coordinator (the agent of rank 0) detects hangs and stragglers."""
    policy = spec.failure_policy
    seconds = policy.hang_timeout_seconds
    return protocol.Limits(None if seconds is None else float(seconds), constants.STRAGGLER_FACTOR)
