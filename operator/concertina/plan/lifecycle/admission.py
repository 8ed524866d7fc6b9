"""Turns of the jobs that wait for resources, so that the jobs do not block each other with pods that can't start alone.

A job waits for resources if fewer of its pods have a node than the job needs. Waiting jobs take turns (`line`). In its
turn, a job keeps its pods, and the other jobs delete their pods after PATIENCE seconds. A job that has deleted its pods
creates new ones when its turn comes, or when no other job waits. A turn ends after TURN_TIMEOUT seconds if the job does
not start. A job whose pods have no nodes does not delete them: pending pods get nodes as soon as nodes have free
resources, and a cluster autoscaler sees such pods.

Some jobs could not start even with more resources (`hindrance`). Such a job deletes its pods, so that other jobs can
use the resources. A job does not delete its pods while no other job waits, or if the pods have the only copy of the
job's state. The operator records turns and deletions in `status.internal.requeueState`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from decimal import Decimal

from concertina.api.internal import RequeueState
from concertina.api.status import rfc3339, unix_seconds
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.lifecycle.line import Waiting, waiting
from concertina.plan.observed import BlockedBy, CreateRefusal, NodeView, PodPhase, PodView, QueuePlace, Refusal
from concertina.plan.recovery import causes
from concertina.plan.rounds import claims

PATIENCE = 20.0
"""Seconds for which a job may keep pods that wait for further pods while another job has its turn."""
TURN_TIMEOUT = 120.0
"""Seconds within which a job must start when it has its turn."""


def by_quota(refused: CreateRefusal | None) -> bool:
    """Return whether a resource quota refused the creation of a pod.

    Of all causes of a refusal, only a used-up quota can disappear because other jobs delete their pods.
    """
    return refused is not None and refused.kind is Refusal.QUOTA


def release(ctx: JobContext) -> Decision | None:
    """Release the job's pods so that another job can start (decision "Waiting jobs take turns at free capacity").

    The result is None if the job does not wait for resources, or may keep its pods for now.
    """
    requeue_state, queue_place, waiting_job = ctx.status.internal.requeue_state, ctx.observed.place, _waiting_job(ctx)
    if waiting_job is None:
        return None
    if requeue_state.since:
        return _without_pods(requeue_state) if queue_place is None or queue_place.ahead else None
    if queue_place is None or not _may_release(ctx, waiting_job) or not _is_due(ctx, queue_place, waiting_job):
        return None
    released = _released(ctx, queue_place, waiting_job).model_copy(update={"since": rfc3339(round(ctx.now, 3))})
    return replace(
        _without_pods(released),
        world=claims.disbanded(ctx, "Requeued"),
        events=(Event("Warning", "Requeued", released.message),),
    )


def seconds_left(ctx: JobContext) -> float:
    """Return the seconds until a waiting job must let other jobs start first; 0 if there is no such limit.

    A job that waits for resources must do so when its turn ends, or when it must delete its pods for another job.
    """
    queue_place, waiting_job = ctx.observed.place, _waiting_job(ctx)
    if waiting_job is None or queue_place is None or ctx.status.internal.requeue_state.since:
        return 0.0
    due = _due(ctx, queue_place, waiting_job)
    return 0.0 if due is None else max(0.0, due - ctx.now)


def next_status(ctx: JobContext, decision: Decision) -> RequeueState:
    """Return the new value of `status.internal.requeueState`: the job's turn, and whether its pods were deleted.

    The value is reset when the job gets a round with members, and when the job trains.
    """
    if decision.requeue_state:
        return decision.requeue_state
    committed = decision.world is not None and decision.world.round > ctx.world.round and decision.world.members
    if committed or decision.phase is Phase.TRAINING:  # a torchrun round begins before all of its pods have nodes
        return RequeueState()
    requeue_state, queue_place, waiting_job = ctx.status.internal.requeue_state, ctx.observed.place, _waiting_job(ctx)
    if queue_place is None:
        return requeue_state
    if requeue_state.since:
        requeue_state = requeue_state.model_copy(update={"since": None, "message": ""})  # the job tries again
    if waiting_job is None or not queue_place.turn:
        return requeue_state.model_copy(update={"turn": None}) if requeue_state.turn else requeue_state
    if _is_due(ctx, queue_place, waiting_job):
        return _released(ctx, queue_place, waiting_job)
    return (
        requeue_state if requeue_state.turn else requeue_state.model_copy(update={"turn": rfc3339(round(ctx.now, 3))})
    )


def _waiting_job(ctx: JobContext) -> Waiting | None:
    observed = ctx.observed
    if observed.place == QueuePlace() and not ctx.status.internal.requeue_state.since:
        return None
    return waiting(observed.job, observed.pods, by_quota(observed.refused))


def _due(ctx: JobContext, queue_place: QueuePlace, waiting_job: Waiting) -> float | None:
    """Return the Unix time at which a waiting job must let other jobs start first; None if there is no such time.

    Args:
        ctx: Context of this planning pass.
        queue_place: Place of the job among the jobs that wait for resources.
        waiting_job: Data of the job for the order of turns.
    """
    requeue_state, due = ctx.status.internal.requeue_state, []
    if queue_place.turn:
        due.append((unix_seconds(requeue_state.turn) if requeue_state.turn else ctx.now) + TURN_TIMEOUT)
    if _may_release(ctx, waiting_job):
        if queue_place.ahead:
            due.append(waiting_job.newest_pod + PATIENCE)
        if queue_place.hindrance:
            # A job that has trained may have lost a node that will return, so it waits longer.
            due.append(waiting_job.newest_pod + (TURN_TIMEOUT if waiting_job.trained else PATIENCE))
    return min(due, default=None)


def _is_due(ctx: JobContext, queue_place: QueuePlace, waiting_job: Waiting) -> bool:
    due = _due(ctx, queue_place, waiting_job)
    return due is not None and due <= ctx.now


def _may_release(ctx: JobContext, waiting_job: Waiting) -> bool:
    """Return whether the job occupies resources and can release them without losing the only copy of its state."""
    if not waiting_job.held:
        return False
    if ctx.round.members and ctx.keeps_state and ctx.spec.checkpoint is None:
        return False
    return not (ctx.round.committed and causes.broken(ctx) is None)


def _released(ctx: JobContext, queue_place: QueuePlace, waiting_job: Waiting) -> RequeueState:
    """Return the new RequeueState of a job whose turn has just ended, or whose pods were just released for other jobs.

    If more resources would not help the job, it loses its turn too. Its next turn comes only after those of all other
    jobs.
    """
    requeue_state = ctx.status.internal.requeue_state
    had = f"only {waiting_job.held} of the {waiting_job.least} required replicas have resources"
    passes = queue_place.turn or queue_place.hindrance is not None
    if passes:
        why = f", and more room would not help: {queue_place.hindrance.value}" if queue_place.hindrance else ""
        does = "releases them, and lets" if _may_release(ctx, waiting_job) else "lets"
        message = f"{had}{why}; {does} other waiting jobs have their turn first"
    else:
        assert queue_place.ahead is not None
        namespace, name = queue_place.ahead
        next_job = f"{namespace}/{name}" if namespace == waiting_job.namespace else "a job of another namespace"
        message = f"{had}: releases them for {next_job}, whose turn it is; tries again when its own turn comes"
    return RequeueState(
        count=requeue_state.count + 1,
        passed=rfc3339(round(ctx.now, 3)) if passes else requeue_state.passed,
        passed_fitting=queue_place.fits or queue_place.hindrance is not None
        if passes
        else requeue_state.passed_fitting,
        priority=waiting_job.priority,
        message=message,
    )


def _without_pods(requeue_state: RequeueState) -> Decision:
    return Decision(Phase.WAITING, "Requeued", requeue_state.message, requeue_state=requeue_state, pods=Pods.NONE)


# --- reasons why a job can't start although there is more room


def hindrance(
    least: int, pods: Collection[PodView], nodes: Mapping[str, NodeView] | None, fits_quota: int | None
) -> BlockedBy | None:
    """Return the reason why more resources would not help a waiting job; None if they would help.

    Args:
        least: Number of pods that the job needs.
        pods: Pods of the job.
        nodes: Nodes, keyed by name; None if the operator does not watch nodes.
        fits_quota: Number of the job's pods that the resource quota allows in total, if a quota refused a pod;
            otherwise None.
    """
    alive = [pod for pod in pods if not pod.deleting and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)]
    if _excluded(alive):
        return BlockedBy.EXCLUDED
    if nodes is not None and not _could_hold(least, alive, nodes):
        return BlockedBy.TOO_LARGE
    if fits_quota is None:
        return None
    return BlockedBy.BEYOND_QUOTA if fits_quota < least else BlockedBy.QUOTA


def _excluded(alive: Collection[PodView]) -> bool:
    """Return whether the scheduler reports for one of the job's waiting pods that no node can ever take the pod.

    The pods of a job are alike, so such a report about one pod applies to all of them. Pods are left out if the
    operator excludes nodes for them.
    """
    return any(pod.excluded and not pod.avoids for pod in alive)


def _could_hold(least: int, alive: Collection[PodView], nodes: Mapping[str, NodeView]) -> bool:
    """Return whether `least` pods would fit on the cluster's usable nodes if no other pods ran there.

    Usable nodes are those of the job and those that accept new pods. Rules about where pods may run are ignored. True
    can therefore be wrong, but False is always right. A resource that no node lists is ignored too, because such a
    resource can come from elsewhere, for example from a resource claim (decision "No turn for jobs that free capacity
    cannot help").
    """
    requests = next((pod.requests for pod in alive if pod.requests), None)
    if requests is None:
        return True
    named = [
        name
        for name, amount in requests.items()
        if amount > 0 and any(name in node.allocatable for node in nodes.values())
    ]
    used_nodes, room = {pod.node for pod in alive}, 0
    for node in nodes.values():
        if node.name in used_nodes or (node.ready and not node.cordoned):
            offers = node.allocatable
            if not offers:
                return True  # the node does not list its resources
            room += min((int(offers.get(name, Decimal(0)) // requests[name]) for name in named), default=least)
            if room >= least:
                return True
    return False
