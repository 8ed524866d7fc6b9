"""Replicas on faulty hardware: a GPU whose driver reports an error, or a node with a condition for a fault.

The operator moves such a replica to another node before its workers fail, if the job can continue without it meanwhile.
The entry in `status.restarts` makes new pods avoid the node (decision "Faulty hardware is left before it fails").
"""

from __future__ import annotations

from dataclasses import replace

from concertina.api.restarts import LONGEST_MESSAGE, Restart
from concertina.api.spec import Launcher, Reaction
from concertina.api.status import rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Reason
from concertina.plan.observed import PodPhase, PodView
from concertina.plan.pods import bad_nodes
from concertina.plan.pods.pod_plan import delete, same_replica

SHOWN, LONGEST = 3, 250
"""Number of hardware faults that a message names, and the maximum length of each in characters."""
REPLACEMENTS = 3
"""Largest number of times that a replica is replaced because of its hardware within `failurePolicy.windowSeconds`."""


def keeps_out(ctx: JobContext, pod: PodView) -> str:
    """Return why a replica outside of the round must be replaced because of faulty hardware; "" if it need not be.

    If `spec.failurePolicy` requires only a report of such faults, the result contains only faults that the preflight
    (the test of the GPUs at the start) has found: with such a fault, the replica never becomes ready.

    Two kinds of replicas are never replaced here. A member of the last round has training state, which the next round
    may need. A running pod of torchrun may be training, which the operator can't see.
    """
    at_work = ctx.spec.launcher is Launcher.TORCHRUN and pod.phase is PodPhase.RUNNING
    if at_work or pod.name in ctx.round.members or _returns_because(ctx, pod.name):
        return ""
    if ctx.spec.failure_policy.on_hardware_fault is Reaction.REPLACE:
        return ctx.replicas.hardware_faults.get(pod.name, "")
    report = ctx.agent(pod.name).report
    return report.gpu_fault if report and report.preflight_failed else ""


def failed_because_of_gpu(ctx: JobContext, replica: str) -> bool:
    """Return whether the failure of a replica's worker is probably due to a GPU.

    This applies to the first failure only. If the replica fails again, for example because there is no other node, that
    failure counts like any other. A bug of the script therefore still ends the job.
    """
    replaces = ctx.spec.failure_policy.on_hardware_fault is Reaction.REPLACE
    return replaces and replica in ctx.replicas.gpu_faults and not _pods_with_entries(ctx, replica)


def sentence(ctx: JobContext, replica: str) -> str:
    node = f" on node {name}" if (name := ctx.node_of(replica)) else ""
    return f"replica {replica}{node} has faulty hardware: {ctx.replicas.hardware_faults[replica][:LONGEST]}"


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """Report the members with faulty hardware of a round that trains. If the spec requires it, replace the first one.

    In a drain, all ranks stop after the same step. The deletion of the member's pod drains the round, so no step is
    lost.
    """
    members = _shown(ctx)
    if decision.phase is not Phase.TRAINING or decision.unchanged or not members:
        return decision
    known = ctx.status.internal.hardware_faults
    new = [name for name in members if _key(ctx, name) not in known and name not in _pods_with_entries(ctx, name)]
    events = tuple(Event("Warning", Reason.HARDWARE_FAULT, sentence(ctx, name)) for name in new)
    message = "; ".join((decision.message, *(sentence(ctx, name) for name in members)))
    return _replaced(ctx, replace(decision, message=message, events=(*decision.events, *events)), members[0])


def reported(ctx: JobContext, decision: Decision) -> tuple[str, ...]:
    """Return the new value of `status.internal.hardwareFaults`. It stays unchanged until the round trains.

    The value contains the kind of each fault. The text of a fault may change with each pass, for example if it contains
    a time.
    """
    if decision.phase is not Phase.TRAINING or decision.unchanged:
        return ctx.status.internal.hardware_faults
    return tuple(_key(ctx, name) for name in _shown(ctx))


def _shown(ctx: JobContext) -> list[str]:
    return [name for name in ctx.round.members if name in ctx.replicas.hardware_faults][:SHOWN]


def _key(ctx: JobContext, replica: str) -> str:
    return f"{replica} {'gpu' if replica in ctx.replicas.gpu_faults else 'node'}"


def _replaced(ctx: JobContext, decision: Decision, replica: str) -> Decision:
    pod = ctx.replicas.pods.get(replica)
    if ctx.spec.failure_policy.on_hardware_fault is Reaction.REPORT or pod is None or pod.deleting:
        return decision
    if why := _kept_because(ctx, pod):
        return replace(decision, message=f"{decision.message}; it is not replaced: {why}")
    decision = replace(decision, actions=(*decision.actions, *delete(ctx, pod, "has faulty hardware")))
    if replica in _pods_with_entries(ctx, replica):  # the deletion in an earlier pass did not reach the API server
        return decision
    entry = Restart(
        at=rfc3339(ctx.now),
        replica=pod.name,
        node=pod.node,
        reason=Reason.HARDWARE_FAULT,
        step=ctx.round.step,
        counted=False,
        message=sentence(ctx, replica)[:LONGEST_MESSAGE],
    )
    return replace(decision, restart=entry)


def _pods_with_entries(ctx: JobContext, replica: str) -> set[str]:
    """Return the pods of the replica, present and earlier, for which `status.restarts` has an entry about hardware."""
    names = {entry.replica for entry in ctx.recent if entry.reason == Reason.HARDWARE_FAULT}
    return {name for name in names if same_replica(name, replica)}


def _kept_because(ctx: JobContext, pod: PodView) -> str:
    healthy = (ctx.replicas.ready | ctx.round.members.keys()) - ctx.replicas.hardware_faults.keys()
    if not sizes.fitting(len(healthy), ctx.spec):
        return "the job can't continue without it"
    if not bad_nodes.can_be_left(ctx, {pod.node}):
        return "there is no other node"
    return _returns_because(ctx, pod.name)


def _returns_because(ctx: JobContext, replica: str) -> str:
    """Return why a new pod of the replica would probably have faulty hardware as well, or an empty text."""
    if not ctx.spec.failure_policy.avoid_node_seconds:
        return "failurePolicy.avoidNodeSeconds is 0, so its new pod could return to the node"
    if len(_pods_with_entries(ctx, replica) - {replica}) >= REPLACEMENTS:
        return f"{REPLACEMENTS} pods before it had faulty hardware as well"
    return ""
