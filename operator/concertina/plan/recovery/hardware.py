"""Replicas on faulty hardware: a GPU whose driver reports an error, or a node with a condition for a fault.

The operator moves such a replica to another node before its workers fail, as far as the job can continue without it.
The entry in `status.restarts` makes new pods avoid the node (decision "Faulty hardware is left before it fails").
"""

from __future__ import annotations

from dataclasses import replace

from concertina.api.restarts import LONGEST_MESSAGE, Restart
from concertina.api.spec import Reaction
from concertina.api.status import ConditionType, rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Reason
from concertina.plan.observed import PodView
from concertina.plan.pods import bad_nodes
from concertina.plan.pods.pod_plan import delete

SHOWN, LONGEST = 3, 250
"""Number of faults that a message names, and maximum length of a fault in it."""


def keeps_out(ctx: JobContext, pod: PodView) -> str:
    """Return a clause about faulty hardware because of which a replica outside of the round must be replaced, or "".

    If the spec only asks for a report, this is a fault that the preflight found, since the replica never becomes ready.
    """
    if ctx.spec.failure_policy.on_hardware_fault is Reaction.REPLACE:
        return ctx.replicas.hardware_faults.get(pod.name, "")
    report = ctx.agent(pod.name).report
    return report.gpu_fault if report and report.preflight_failed else ""


def failed_because_of_gpu(ctx: JobContext, replica: str) -> bool:
    """Return whether the failure of a replica's worker is probably due to a GPU.

    This applies to the first failure only. If the replica fails again, for example because no other node is there, the
    failure counts as any other, so that a bug of the script still ends the job.
    """
    replaces = ctx.spec.failure_policy.on_hardware_fault is Reaction.REPLACE
    return replaces and replica in ctx.replicas.gpu_faults and not _entry(ctx, replica)


def sentence(ctx: JobContext, replica: str) -> str:
    node = f" on node {name}" if (name := ctx.node_of(replica)) else ""
    return f"replica {replica}{node} has faulty hardware: {ctx.replicas.hardware_faults[replica][:LONGEST]}"


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """Report the members with faulty hardware of a round that trains, and replace the first one if the spec asks so.

    The deletion of the pod drains the round, so no step is lost.
    """
    members = [name for name in ctx.round.members if name in ctx.replicas.hardware_faults]
    if decision.phase is not Phase.TRAINING or not members:
        return decision
    sentences = [sentence(ctx, name) for name in members[:SHOWN]]
    before = ctx.status.condition(ConditionType.RUNNING)
    known = before.message if before else ""
    new = [text for name, text in zip(members, sentences, strict=False) if text not in known and not _entry(ctx, name)]
    events = tuple(Event("Warning", Reason.HARDWARE_FAULT, text) for text in new)
    decision = replace(decision, message="; ".join((decision.message, *sentences)), events=(*decision.events, *events))
    return _replaced(ctx, decision, members[0])


def _replaced(ctx: JobContext, decision: Decision, replica: str) -> Decision:
    pod = ctx.replicas.pods.get(replica)
    if ctx.spec.failure_policy.on_hardware_fault is Reaction.REPORT or pod is None or pod.deleting:
        return decision
    if _entry(ctx, replica):
        return decision
    if why := _kept_because(ctx, pod):
        return replace(decision, message=f"{decision.message}; it is not replaced: {why}")
    entry = Restart(
        at=rfc3339(ctx.now),
        replica=pod.name,
        node=pod.node,
        reason=Reason.HARDWARE_FAULT,
        step=ctx.round.step,
        counted=False,
        message=sentence(ctx, replica)[:LONGEST_MESSAGE],
    )
    return replace(decision, restart=entry, actions=(*decision.actions, *delete(ctx, pod, "has faulty hardware")))


def _entry(ctx: JobContext, replica: str) -> bool:
    """Return whether `status.restarts` has an entry because of the replica's hardware."""
    return any(entry.replica == replica and entry.reason == Reason.HARDWARE_FAULT for entry in ctx.recent)


def _kept_because(ctx: JobContext, pod: PodView) -> str:
    if not sizes.fitting(len(ctx.replicas.ready | ctx.round.members.keys()) - 1, ctx.spec):
        return "the job can't continue without it"
    if pod.node not in bad_nodes.avoided(ctx) and len(bad_nodes.avoided(ctx)) >= bad_nodes.spare(ctx):
        return "there is no other node"
    return ""
