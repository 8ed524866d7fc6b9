"""Choice of the function that plans a job's pods, by the field `pods` of the policy's decision.

For example, one of these functions deletes all pods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from concertina.api.spec import CleanPodPolicy, Launcher
from concertina.plan.actions import Action, EndPod
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.observed import PodPhase, PodView
from concertina.plan.pods import agent_pods, torchrun_pods
from concertina.plan.pods.pod_plan import PodPlan, delete, packed


def _none(ctx: JobContext) -> PodPlan:
    """Delete all pods, and increase the attempt numbers so that a resumed job's pods get new names."""
    actions = [action for pod in ctx.observed.pods for action in delete(ctx, pod, "is not wanted now")]
    attempts = dict(enumerate(ctx.status.internal.attempts))
    for pod in ctx.observed.pods:
        if pod.index is not None:
            attempts[pod.index] = max(attempts.get(pod.index, 0), pod.attempt + 1)
    return PodPlan(tuple(actions), packed(attempts))


def _ended(ctx: JobContext, failed: bool) -> PodPlan:
    """Plan the pods of a job that has ended, as `spec.cleanPodPolicy` says.

    If the job is deleted, all running pods are deleted. If the job has failed, the containers of its running pods are
    stopped and the pods stay, because their logs explain the failure (decision "Pods of a failed job are stopped, not
    deleted").
    """
    policy = ctx.spec.clean_pod_policy
    if policy is CleanPodPolicy.NONE and not ctx.observed.job.deleting:
        return _kept(ctx)
    actions: list[Action] = []
    waits: list[float] = []
    for pod in ctx.observed.pods:
        if pod.released and policy is not CleanPodPolicy.ALL:
            continue
        ends = failed and policy is not CleanPodPolicy.ALL and _can_be_ended(ctx, pod)
        seconds_left = ctx.ended_at + (pod.grace + constants.END if ends else constants.LINGER) - ctx.now
        if seconds_left <= 0:
            actions += delete(ctx, pod, "is not needed any more: the job has ended")
            continue
        waits.append(seconds_left)
        if ends and not pod.ending:
            actions.append(EndPod(pod.name, pod.uid, f"replica {pod.name} has failed with its job"))
    return PodPlan(tuple(actions), ctx.status.internal.attempts, recheck=min(waits, default=None))


def _can_be_ended(ctx: JobContext, pod: PodView) -> bool:
    """Return whether the pod's containers can be stopped, and its log may help.

    The pod must have started, and its node must be able to stop containers.
    """
    node = ctx.node(pod)
    return (
        pod.index is not None
        and pod.phase is not PodPhase.PENDING
        and not pod.deleting
        and node.ready
        and not node.out_of_service
    )


def _kept(ctx: JobContext) -> PodPlan:
    return PodPlan((), ctx.status.internal.attempts)


Planner = Callable[[JobContext], PodPlan]
WANTED: Mapping[Launcher, Planner] = {Launcher.AGENT: agent_pods.wanted, Launcher.TORCHRUN: torchrun_pods.wanted}
"""Functions that plan the pods that the spec asks for, with dead pods replaced, by launcher."""


def plan_pods(ctx: JobContext, decision: Decision) -> PodPlan:
    match decision.pods:
        case Pods.WANTED:
            return WANTED[ctx.spec.launcher](ctx)
        case Pods.NONE:
            return _none(ctx)
        case Pods.ENDED:
            return _ended(ctx, failed=decision.phase is Phase.FAILED)
        case Pods.KEPT:
            return _kept(ctx)
