"""Plan the pods of jobs with agents.

Each replica index needs one live pod. Dead pods are replaced, and surplus pods are deleted.
"""

from __future__ import annotations

from concertina.api.pod_names import parse
from concertina.plan.actions import Action, CreatePod, CreateSecret
from concertina.plan.facts import constants, gangs, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import PodView
from concertina.plan.pods import bad_nodes, pod_backoff
from concertina.plan.pods.pod_plan import PodPlan, delete, number_at, packed, pass_over_taken, replaced_event
from concertina.plan.state import snapshot_memory


def wanted(ctx: JobContext) -> PodPlan:
    wanted_indexes = ctx.replicas.wanted_indexes
    attempts = _bumped(ctx, wanted_indexes)
    current = {(pod.index, pod.attempt) for pod in ctx.observed.pods}
    missing = [
        index
        for index in sorted(wanted_indexes)
        if (index, number_at(attempts, index)) not in current and not _filled(ctx, index)
    ]
    last_attempts = ctx.status.internal.attempts
    dead = [pod for pod in ctx.observed.pods if _goes(ctx, pod) and pod.attempt == number_at(last_attempts, pod.index)]
    replaced = tuple(pod for pod in dead if number_at(attempts, pod.index) > pod.attempt)
    creates, recheck = _creates(ctx, missing, attempts)
    events = tuple(replaced_event(ctx, pod) for pod in replaced)
    return PodPlan(
        (*creates, *_deletes(ctx, wanted_indexes, attempts)), attempts, replaced, events, recheck, bool(missing)
    )


def _goes(ctx: JobContext, pod: PodView) -> bool:
    """Return whether the pod needs a successor (a new pod for the same replica index).

    A pod needs a successor if the pod is dead, or if it is a member of the round and will be terminated soon. If a pod
    outside of the round will be terminated soon, the operator waits for SETTLED seconds first: the pod may tolerate the
    taint that announces the termination, and its successor could be placed on such a node again.
    """
    if pod.name in ctx.replicas.dead or pod.name not in ctx.replicas.notices:
        return pod.name in ctx.replicas.dead
    return pod.name in ctx.round.members or (ctx.replicas.leaves(pod.name) and ctx.age(pod) >= constants.SETTLED)


def _filled(ctx: JobContext, index: int) -> bool:
    """Return whether a live replica without a termination notice has this index.

    The index then needs no other pod. Another pod can exist if a termination notice of the replica was withdrawn.
    """
    name = ctx.replicas.pod_by_index.get(index)
    return name is not None and name not in ctx.replicas.notices


def _bumped(ctx: JobContext, wanted_indexes: frozenset[int]) -> tuple[int, ...]:
    """Return the attempt number of each replica index, plus one for each index that needs a new pod.

    The attempt number is a part of a pod's name. An index needs a new pod if its newest pod is dead, or if the pod of a
    member is gone.
    """
    attempts = dict(enumerate(ctx.status.internal.attempts))
    for name in ctx.round.members.keys() - ctx.replicas.pods.keys():  # its pod is gone, and its name is not used again
        parsed = parse(name)
        if parsed and parsed.index is not None and parsed.index in wanted_indexes:
            attempts[parsed.index] = max(attempts.get(parsed.index, 0), parsed.attempt + 1)
    for pod in ctx.observed.pods:
        if pod.index is not None and pod.index in wanted_indexes:
            least_attempt = pod.attempt + 1 if _goes(ctx, pod) else pod.attempt
            attempts[pod.index] = max(attempts.get(pod.index, 0), least_attempt)
    pass_over_taken(ctx.observed.job.name, attempts, wanted_indexes, ctx.observed.taken)
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
    group = gangs.pod_group(ctx)
    creates = (
        CreatePod(
            index,
            number_at(attempts, index),
            avoid,
            never,
            standby=standing + number >= sizes.most(ctx.spec),
            snapshot_memory=memory,
            pod_group=group,
        )
        for number, index in enumerate(missing)
        if index in due
    )
    return (*secret, *creates), recheck


def _ending(ctx: JobContext) -> set[str]:
    """Return the nodes of replicas that will be terminated or are cordoned, so that new pods avoid them.

    A pod that tolerates the node's taint could otherwise be placed on such a node again.
    """
    nodes = (ctx.node(ctx.replicas.pods[name]) for name in ctx.replicas.notices)
    return {node.name for node in nodes if node.notice or node.cordoned}


def _deletes(ctx: JobContext, wanted_indexes: frozenset[int], attempts: tuple[int, ...]) -> tuple[Action, ...]:
    """Return deletions of dead pods, of pods of older attempts, and of surplus pods.

    The newest dead pod that ended by itself is not deleted, so that its logs stay readable.
    """
    actions: list[Action] = []
    for pod in ctx.observed.pods:
        newest = number_at(attempts, pod.index)
        if pod.name in ctx.replicas.dead:
            if pod.released and not pod.deleting and pod.attempt >= newest - 1:
                continue
            actions += delete(ctx, pod, ctx.replicas.dead[pod.name])
        elif pod.name in ctx.round.members and (ctx.round.committed or pod.name in ctx.replicas.notices):
            continue  # deleted only once a round without this member has begun
        elif pod.name in ctx.round.members and ctx.keeps_state and ctx.round.claimed:
            continue  # may hold the state from which the round being formed continues
        elif pod.index not in wanted_indexes:
            actions += delete(ctx, pod, _surplus_because(ctx))
        elif ctx.replicas.pod_by_index.get(pod.index) == pod.name:
            continue
        elif pod.attempt < newest:
            actions += delete(ctx, pod, _replaced_because(ctx, pod.name))
        elif _filled(ctx, pod.index):
            actions += delete(ctx, pod, f"is not needed: {ctx.replicas.pod_by_index[pod.index]} stays")
    return tuple(actions)


def _surplus_because(ctx: JobContext) -> str:
    limited = ctx.lending.limits and ctx.spec.replicas < ctx.wanted_spec.replicas
    return "exceeds the quota of its queue" if limited else "exceeds spec.replicas"


def _replaced_because(ctx: JobContext, name: str) -> str:
    notice = ctx.replicas.notices.get(name)
    return notice.message if notice else "has a successor"
