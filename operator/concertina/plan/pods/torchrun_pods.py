"""Plan the pods of jobs with torchrun: first the pod that serves the TCPStore, then the members that connect to it."""

from __future__ import annotations

from concertina.plan.actions import Action, CreatePod, CreateRendezvous, Rendezvous
from concertina.plan.facts import constants, gangs, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import PodPhase, PodView
from concertina.plan.pods import pod_backoff
from concertina.plan.pods.pod_plan import PodPlan, delete, packed, pass_over_taken, replaced_event


def wanted(ctx: JobContext) -> PodPlan:
    """Plan the pod of torchrun's store first, then the members once the store's address is known.

    Pods of earlier rounds are deleted.
    """
    round = ctx.world.round
    deletes = [
        action
        for pod in ctx.observed.pods
        if pod.round != round and not (pod.round == round - 1 and pod.released)
        for action in delete(ctx, pod, "belongs to an earlier rendezvous")
    ]
    server = store(ctx)
    if server is None:
        creates, wait = _allowed(ctx, (CreateRendezvous(round),))
        return PodPlan((*deletes, *creates), ctx.status.internal.attempts, recheck=wait, missing=True)
    indexes = range(sizes.most(ctx.spec))
    ending = any(pod.phase is PodPhase.SUCCEEDED for pod in members(ctx))
    attempts = dict(enumerate(ctx.status.internal.attempts))
    replaced: list[PodView] = []
    for pod in ctx.observed.pods:
        if pod.index is None:
            continue
        if pod.index not in indexes:
            deletes += delete(ctx, pod, "exceeds spec.replicas") if pod.round == round else []
            continue
        is_gone = pod.round != round or (pod.name in ctx.replicas.dead and not ending)
        least_attempt = pod.attempt + 1 if is_gone else pod.attempt
        if is_gone and pod.round == round and least_attempt > attempts.get(pod.index, 0):
            replaced.append(pod)
        if is_gone and pod.round == round:
            deletes += _let_go(ctx, pod)
        attempts[pod.index] = max(attempts.get(pod.index, 0), least_attempt)
    deletes += [
        action
        for pod in ctx.observed.pods
        if pod.index is not None and pod.attempt < attempts.get(pod.index, 0) - 1
        if pod.released and pod.round == round
        for action in delete(ctx, pod, "has had two successors")
    ]
    pass_over_taken(ctx.observed.job.name, attempts, indexes, ctx.observed.taken)
    current = {(pod.index, pod.attempt) for pod in ctx.observed.pods}
    missing = [index for index in indexes if (index, attempts.get(index, 0)) not in current]
    address = f"[{server.ip}]:{server.port}" if ":" in server.ip else f"{server.ip}:{server.port}"
    creations: tuple[Action, ...] = ()
    if server.ip and server.phase is PodPhase.RUNNING and not ending:
        rendezvous = Rendezvous(address, round, sizes.least(ctx.spec))
        group = gangs.pod_group(ctx)
        creations = tuple(
            CreatePod(index, attempts.get(index, 0), rendezvous=rendezvous, pod_group=group) for index in missing
        )
    creates, wait = _allowed(ctx, creations)
    events = tuple(replaced_event(ctx, pod) for pod in replaced)
    return PodPlan((*deletes, *creates), packed(attempts), tuple(replaced), events, wait, bool(missing))


def _let_go(ctx: JobContext, pod: PodView) -> list[Action]:
    """Return the deletion of a pod that is replaced; empty if the pod has ended.

    A pod that has ended stays, so that its logs stay readable.
    """
    return [] if pod.released else delete(ctx, pod, ctx.replicas.dead[pod.name])


def _allowed(ctx: JobContext, creates: tuple[Action, ...]) -> tuple[tuple[Action, ...], float | None]:
    if not creates:
        return (), None
    wait = pod_backoff.refused_for(ctx)
    if wait > 0:
        return (), wait
    return creates[:1] if ctx.observed.refused else creates, constants.CREATE_RETRY


def members(ctx: JobContext) -> list[PodView]:
    """Return the newest pod of each replica index in this torchrun round, without pods that are being deleted."""
    newest: dict[int, PodView] = {}
    for pod in ctx.observed.pods:  # in order of attempts
        if pod.index is not None and pod.round == ctx.world.round and not pod.deleting:
            newest[pod.index] = pod
    return list(newest.values())


def store(ctx: JobContext) -> PodView | None:
    stores = (pod for pod in ctx.observed.pods if pod.index is None and pod.round == ctx.world.round)
    return next(stores, None)
