"""Plan writes of the job's pod group: create it before its pods, and delete it once no pod refers to it."""

from __future__ import annotations

from concertina.plan.actions import Action, ApplyPodGroup, DeletePodGroup
from concertina.plan.facts import gangs
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Pods
from concertina.plan.observed import GangApi, PodGroup


def actions(ctx: JobContext, decision: Decision) -> tuple[Action, ...]:
    """Return the actions that create, update or delete the job's pod group, as the decision about its pods requires."""
    group = gangs.pod_group(ctx)
    return (*_outdated(ctx, group.name if group else ""), *_current(ctx, decision, group))


def _current(ctx: JobContext, decision: Decision, group: PodGroup | None) -> tuple[Action, ...]:
    if group is None or not group.name:
        return ()
    if decision.pods is Pods.WANTED:
        is_current = ctx.observed.pod_group == group or ctx.observed.job.deleting
        return () if is_current else (ApplyPodGroup(group),)
    gone = all(pod.released for pod in ctx.observed.pods)
    unwanted = decision.pods in (Pods.NONE, Pods.ENDED) and gone and not ctx.observed.pod_group_deleted
    # A scheduler with queues counts a group without pods as demand. A job that never had a group has no status.gang
    # yet.
    return (DeletePodGroup(group.api, group.name),) if unwanted and ctx.status.gang is not None else ()


def _outdated(ctx: JobContext, current_name: str) -> tuple[Action, ...]:
    """Return the deletion of the pod group in `status.gang`, if no further pods will join that group."""
    last = ctx.status.gang
    if last is None or not last.pod_group or last.pod_group == current_name:
        return ()
    return (DeletePodGroup(GangApi(last.api_version), last.pod_group),)
