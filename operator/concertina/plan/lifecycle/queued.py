"""Status, pods and events of jobs that wait for Kueue quota or return it (`plan/quota`)."""

from __future__ import annotations

from dataclasses import replace

from concertina.api.status import JobStatus
from concertina.plan.actions import CreatePod, CreateRendezvous, Event, PodQuota
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, stalled
from concertina.plan.kueue import PodChanges, PodSet
from concertina.plan.pods.pod_plan import PodPlan


def annotate_queue(ctx: JobContext, decision: Decision) -> Decision:
    """Change the decision about a job that has no Kueue quota, so that its status says why.

    Without this change, the status would say that the job is suspended. With it, the status says that the job is
    queued, or that it is returning its quota.
    """
    lending = ctx.lending
    if not ctx.stopped_by_queue or decision.phase not in (Phase.SUSPENDED, Phase.SUSPENDING):
        return decision
    if decision.phase is Phase.SUSPENDING:
        return replace(decision, reason=lending.reason)
    if lending.stalled:
        return replace(stalled(lending.reason, lending.message, Pods.NONE), world=decision.world)
    return replace(decision, phase=Phase.QUEUED, reason=lending.reason, message=lending.message)


def within_quota(ctx: JobContext, pods: PodPlan) -> PodPlan:
    """Return the pod plan, without the creations of pods for which the job has no Kueue quota left.

    Each remaining creation names the quota that the new pod uses.
    """
    if not ctx.lending.queue:
        return pods
    room = dict(ctx.lending.room)
    actions = []
    for action in pods.actions:
        if isinstance(action, CreatePod | CreateRendezvous):
            pod_set = _set_for(action, room)
            if pod_set is None:
                continue
            room[pod_set] -= 1
            changes = ctx.lending.changes.get(pod_set, PodChanges())
            action = replace(action, quota=PodQuota(ctx.lending.lender, pod_set, changes))
        actions.append(action)
    return replace(pods, actions=tuple(actions))


def _set_for(create: CreatePod | CreateRendezvous, room: dict[PodSet, int]) -> PodSet | None:
    """Return the first pod set for such a pod that has quota left in `room`; None if there is no such set."""
    sets = (PodSet.RENDEZVOUS,) if isinstance(create, CreateRendezvous) else (PodSet.TRAINER, PodSet.SPARES)
    return next((pod_set for pod_set in sets if room.get(pod_set, 0) > 0), None)


def events(ctx: JobContext, status: JobStatus) -> tuple[Event, ...]:
    """Return an event if the number of replicas for which the job has quota has changed."""
    before, now = ctx.status.queue, status.queue
    if now is None or (before.replicas if before else 0) == now.replicas or status.completion_time:
        return ()
    wanted = ctx.wanted_spec.replicas
    if now.replicas > (before.replicas if before else 0):
        message = f"The queue {now.name} has admitted {now.replicas} of {wanted} replicas"
        return (Event("Normal", "QuotaAdmitted", message),)
    preempted = now.reason in ("Preempted", "Evicted")
    message = now.message or f"The job uses quota for {now.replicas} of {wanted} replicas"
    return (Event("Warning" if preempted else "Normal", now.reason or "QuotaReleased", message),)
