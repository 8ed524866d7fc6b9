"""Pods under agents: one live pod for each slot, successors for the dead, nothing for what is left over."""

from __future__ import annotations

from concertina.api.pod_names import parse
from concertina.plan.actions import Action, CreatePod, CreateSecret
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import PodView
from concertina.plan.pods import bad_nodes, pod_backoff
from concertina.plan.pods.pod_plan import PodPlan, delete, number_at, packed, pass_over_taken, replaced_event
from concertina.plan.state import snapshot_memory


def wanted(ctx: JobContext) -> PodPlan:
    wanted = ctx.replicas.wanted_indexes
    attempts = _bumped(ctx, wanted)
    current = {(pod.index, pod.attempt) for pod in ctx.observed.pods}
    missing = [
        index
        for index in sorted(wanted)
        if (index, number_at(attempts, index)) not in current and not _filled(ctx, index)
    ]
    before = ctx.status.internal.attempts
    dead = [pod for pod in ctx.observed.pods if _goes(ctx, pod) and pod.attempt == number_at(before, pod.index)]
    replaced = tuple(pod for pod in dead if number_at(attempts, pod.index) > pod.attempt)
    creates, recheck = _creates(ctx, missing, attempts)
    events = tuple(replaced_event(ctx, pod) for pod in replaced)
    return PodPlan((*creates, *_deletes(ctx, wanted, attempts)), attempts, replaced, events, recheck, bool(missing))


def _goes(ctx: JobContext, pod: PodView) -> bool:
    """Whether it needs a successor: dead, or a member with a notice, or one that is not needed yet and must leave. (A
    successor with a notice of its own is not succeeded at once: pods may tolerate what announces the end of nodes.)"""
    if pod.name in ctx.replicas.dead or pod.name not in ctx.replicas.notices:
        return pod.name in ctx.replicas.dead
    return pod.name in ctx.round.members or (ctx.replicas.leaves(pod.name) and ctx.age(pod) >= constants.SETTLED)


def _filled(ctx: JobContext, index: int) -> bool:
    """Whether a replica of this index stays, though a newer attempt was asked for when it had a notice."""
    name = ctx.replicas.pod_by_index.get(index)
    return name is not None and name not in ctx.replicas.notices


def _bumped(ctx: JobContext, wanted: frozenset[int]) -> tuple[int, ...]:
    """Attempts such that each wanted index is beyond its newest dead pod, and beyond members that are gone."""
    attempts = dict(enumerate(ctx.status.internal.attempts))
    for name in ctx.round.members.keys() - ctx.replicas.pods.keys():  # gone without a trace: its name isn't used again
        parsed = parse(name)
        if parsed and parsed.index is not None and parsed.index in wanted:
            attempts[parsed.index] = max(attempts.get(parsed.index, 0), parsed.attempt + 1)
    for pod in ctx.observed.pods:
        if pod.index is not None and pod.index in wanted:
            least = pod.attempt + 1 if _goes(ctx, pod) else pod.attempt
            attempts[pod.index] = max(attempts.get(pod.index, 0), least)
    pass_over_taken(ctx.observed.job.name, attempts, wanted, ctx.observed.taken)
    return packed(attempts)


def _creates(ctx: JobContext, missing: list[int], attempts: tuple[int, ...]) -> tuple[tuple[Action, ...], float | None]:
    if not missing:
        return (), None
    if (wait := pod_backoff.refused_for(ctx)) > 0:
        return (), wait
    delayed = pod_backoff.next_pods(ctx)
    due = set(missing) - delayed.keys()
    recheck = min([constants.STEADY, *(delayed[index].left for index in missing if index in delayed)])
    if not due:
        return (), recheck
    if ctx.observed.refused:
        due = {min(due)}
    never = bad_nodes.forbidden(ctx)
    avoid = tuple(sorted((_ending(ctx) | set(bad_nodes.avoided(ctx))) - set(never)))
    secret: tuple[Action, ...] = () if ctx.observed.secret_made else (CreateSecret(),)
    standing, memory = len(ctx.replicas.wanted_indexes) - len(missing), snapshot_memory.room(ctx.spec)
    creates = (
        CreatePod(
            index,
            number_at(attempts, index),
            avoid,
            never,
            standby=standing + number >= sizes.most(ctx.spec),
            snapshot_memory=memory,
        )
        for number, index in enumerate(missing)
        if index in due
    )
    return (*secret, *creates), recheck


def _ending(ctx: JobContext) -> set[str]:
    """Nodes that replicas leave: a pod that tolerates their taints might go there again."""
    nodes = (ctx.node(ctx.replicas.pods[name]) for name in ctx.replicas.notices)
    return {node.name for node in nodes if node.notice or node.cordoned}


def _deletes(ctx: JobContext, wanted: frozenset[int], attempts: tuple[int, ...]) -> tuple[Action, ...]:
    """The dead (the newest that ended by itself stays, for its logs), those of older attempts, and those not wanted."""
    actions: list[Action] = []
    for pod in ctx.observed.pods:
        newest = number_at(attempts, pod.index)
        if pod.name in ctx.replicas.dead:
            if pod.released and not pod.deleting and pod.attempt >= newest - 1:
                continue
            actions += delete(ctx, pod, ctx.replicas.dead[pod.name])
        elif pod.name in ctx.round.members and (ctx.round.committed or pod.name in ctx.replicas.notices):
            continue  # only after a round without it
        elif pod.name in ctx.round.members and ctx.keeps_state and ctx.round.claimed:
            continue  # it may hold what the round that is being made goes on from
        elif pod.index not in wanted:
            actions += delete(ctx, pod, "is more than spec.replicas")
        elif ctx.replicas.pod_by_index.get(pod.index) == pod.name:
            continue
        elif pod.attempt < newest:
            actions += delete(ctx, pod, _replaced_because(ctx, pod.name))
        elif _filled(ctx, pod.index):
            actions += delete(ctx, pod, f"is not needed: {ctx.replicas.pod_by_index[pod.index]} stays")
    return tuple(actions)


def _replaced_because(ctx: JobContext, name: str) -> str:
    notice = ctx.replicas.notices.get(name)
    return notice.message if notice else "has a successor"
