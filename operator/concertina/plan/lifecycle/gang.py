"""Policies for gang scheduling: jobs whose gang API is not served, and pod groups that must be created again."""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import first_of
from concertina.plan.actions import Event
from concertina.plan.facts import gangs, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, stalled
from concertina.plan.rounds import claims

GANG_NOT_SERVED = "GangNotServed"
GANG_IGNORED = "GangIgnored"


def not_served(ctx: JobContext) -> Decision | None:
    """Create no pods until the API server is known to serve the gang API that the spec names.

    A job that already has pods continues, because the API was served when these pods were created.
    """
    if ctx.spec.scheduling.gang is None or ctx.spec.suspend or ctx.observed.pods:
        return None
    if ctx.observed.gang_apis is None:
        message = "the operator does not know yet which APIs for gang scheduling the API server serves"
        return Decision(Phase.WAITING, "WaitingForGangApis", message, pods=Pods.NONE)
    message = gangs.not_served(ctx)
    return stalled(GANG_NOT_SERVED, message, Pods.NONE) if message else None


def regroup(ctx: JobContext) -> Decision | None:
    """Delete pending pods whose pod group has an outdated minimum that the API does not allow to change.

    New pods then join a new group with the current minimum. If a pod of the old group already has a node, the operator
    keeps the group until the job has no pods: the minimum matters only for the first start, and running pods can't join
    the new group.
    """
    chosen = gangs.mark(ctx)
    if chosen is None or not chosen.pod_group or chosen.min_count == sizes.least(ctx.spec):
        return None
    if not ctx.observed.pods or any(pod.node for pod in ctx.observed.pods if pod.index is not None):
        return None
    message = (
        f"pod group {chosen.pod_group} waits for {chosen.min_count} pods, and the job needs {sizes.least(ctx.spec)} "
        "now: new pods join a new group"
    )
    event = Event("Normal", "PodGroupReplaced", message)
    return Decision(
        Phase.WAITING, "PodGroupReplaced", message, world=claims.disbanded(ctx, "PodGroupReplaced"),
        pods=Pods.NONE, events=(event,) if not all(pod.deleting for pod in ctx.observed.pods) else (),
    )  # fmt: skip


def annotate_ignored(ctx: JobContext, decision: Decision) -> Decision:
    """Report pods whose reference to the pod group the API server dropped.

    The scheduler places such a pod on its own, without the rest of its group.
    """
    names = gangs.ignored_groups(ctx.status, ctx.replicas.live.values())
    if not names or decision.stalled or decision.pods is not Pods.WANTED:
        return decision
    message = (
        f"the API server dropped the pod group of {first_of(names, 3)}, so pods are scheduled one by one: enable "
        "the feature gate GenericWorkload (in 1.36 GangScheduling too) of the API server and the scheduler, or "
        "remove spec.scheduling.gang"
    )
    return replace(decision, stalled=GANG_IGNORED, stalled_message=message, goes_on=True)
