"""Bad nodes: find the nodes on which the job failed repeatedly, and keep new pods away from them for a while.

The list of bad nodes is derived from `status.restarts` alone. If the job can run without a bad node, its pods get a
strict rule not to use that node. Otherwise they only get a preference (decision "How the operator avoids bad nodes").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from concertina.api.restarts import AvoidedNode, Restart
from concertina.api.status import JobStatus, rfc3339, unix_seconds
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Reason
from concertina.plan.observed import NodeView, PodPhase, PodView
from concertina_protocol import BAD_INPUTS, FailureReason

VERDICTS: Mapping[str, int] = {
    Reason.NODE_LOST: 1,
    Reason.HANG: 2,
    Reason.STRAGGLER: 2,
    Reason.HARDWARE_FAULT: 2,
    FailureReason.SILENT_CORRUPTION: 2,
    Reason.IMAGE_UNAVAILABLE: 2,
    Reason.AGENT_NEVER_STARTED: 2,
    Reason.AGENT_CANNOT_START: 2,
    Reason.NETWORK_PARTITION: 2,
}
"""Failures that are evidence against their node even if they also occur on other nodes, each with its weight."""
NOT_OF_THE_NODE = frozenset({FailureReason.RESTORE_FAILED, *BAD_INPUTS})
ENOUGH = 2
"""Sum of the weights of a node's failures at which new pods avoid the node."""
MOST = 32
LONGEST = 86400.0
UNSCHEDULABLE = 30.0
"""Seconds for which a pod must be unschedulable before a job that can't run otherwise uses its bad nodes again."""
SHORT_HANDED = 180.0
"""Seconds for which a pod must be unschedulable before a job that runs with too few replicas uses its bad nodes again.

The time is longer than UNSCHEDULABLE, because an autoscaler may be adding a node.
"""


def remember(ctx: JobContext, entries: tuple[Restart, ...]) -> tuple[AvoidedNode, ...]:
    """Return the new value of `status.avoidedNodes`.

    `entries` are the job's failures within the failure window, in order of time.
    """
    base = ctx.spec.failure_policy.avoid_node_seconds
    entry_by_node = {
        entry.node: _forgiven_early(ctx, entry) for entry in ctx.status.avoided_nodes if _remembered(ctx, entry)
    }
    if base:
        on_node: dict[str, list[Restart]] = {}
        nodes_by_failure: dict[tuple[str, str], set[str]] = {}
        for entry in entries:
            nodes_by_failure.setdefault((entry.reason, entry.error), set()).add(entry.node)
            if entry.node:
                on_node.setdefault(entry.node, []).append(entry)
        for node, failures in on_node.items():
            weights = [(entry, weight) for entry in failures if (weight := _weight(entry, nodes_by_failure))]
            if weights and (new_entry := _judge(ctx, node, entry_by_node.get(node), weights, base)):
                entry_by_node[node] = new_entry
    latest = sorted(entry_by_node.values(), key=lambda entry: unix_seconds(entry.until))[-MOST:]
    return ctx.status.avoided_nodes if tuple(latest) == ctx.status.avoided_nodes else tuple(latest)


def _remembered(ctx: JobContext, entry: AvoidedNode) -> bool:
    return ctx.now < unix_seconds(entry.until) + ctx.spec.failure_policy.window_seconds


def _judge(
    ctx: JobContext, node: str, earlier: AvoidedNode | None, weights: list[tuple[Restart, int]], base: int
) -> AvoidedNode | None:
    """Return a new entry of `status.avoidedNodes` for a node; None if there is not enough new evidence.

    Further failures on a node that is already avoided have no effect.
    """
    if earlier is not None and unix_seconds(earlier.until) > ctx.now:
        return None
    since = unix_seconds(earlier.until) if earlier else 0.0
    new = [(entry, weight) for entry, weight in weights if unix_seconds(entry.at) > since]
    enough = ENOUGH if earlier is None else 1
    if sum(weight for _, weight in new) < enough:
        return None
    times = earlier.times + 1 if earlier else 1
    last, _ = new[-1]
    until = unix_seconds(last.at) + min(LONGEST, base * 2.0 ** min(times - 1, 20))
    count = f"{len(new)} failures on it" if len(new) > 1 else "a failure on it"
    reason = f"{count}, the last of {last.replica}: {last.reason}{f' ({last.message})' if last.message else ''}"
    return AvoidedNode(node=node, until=rfc3339(until), reason=reason[:300], times=times)


def _weight(entry: Restart, nodes_by_failure: Mapping[tuple[str, str], Collection[str]]) -> int:
    """Return the weight of a failure as evidence against its node.

    The weight is 0 if the failure also occurred on other nodes, or if its cause is external. Failures in VERDICTS have
    fixed weights instead.

    Args:
        entry: The failure.
        nodes_by_failure: Nodes on which each reason and error occurred.
    """
    if entry.reason in VERDICTS:
        return VERDICTS[entry.reason]
    if (
        not entry.counted
        or entry.reason in NOT_OF_THE_NODE
        or (entry.reason == FailureReason.WORKER_SIGNALED and not entry.error)
    ):
        return 0
    return int(len(nodes_by_failure[entry.reason, entry.error]) == 1)


def events(old_status: JobStatus, new_status: JobStatus) -> tuple[Event, ...]:
    """Return an event for each node that new pods start to avoid."""
    if old_status.avoided_nodes is new_status.avoided_nodes:
        return ()
    old_entries = {(entry.node, entry.times) for entry in old_status.avoided_nodes}
    return tuple(
        Event("Warning", "NodeAvoided", f"new pods avoid node {entry.node} until {entry.until}: {entry.reason}")
        for entry in new_status.avoided_nodes
        if (entry.node, entry.times) not in old_entries
    )


# --- where new pods may run


def avoided(ctx: JobContext) -> tuple[str, ...]:
    """Return the nodes that new pods avoid, those with the most failures first."""
    active = [entry for entry in ctx.status.avoided_nodes if unix_seconds(entry.until) > ctx.now]
    return tuple(entry.node for entry in sorted(active, key=lambda entry: (-entry.times, entry.node)))


def forbidden(ctx: JobContext) -> tuple[str, ...]:
    """Return the bad nodes on which no pod of the job may run.

    These are the bad nodes that the job does not need even when it runs with all requested replicas. Pods only prefer
    not to run on the other bad nodes.
    """
    return tuple(sorted(avoided(ctx)[: spare(ctx)]))


def spare(ctx: JobContext) -> int:
    """Return the number of usable nodes that the job does not need to run with all requested replicas."""
    return max(0, sum(_serves(node) for node in ctx.observed.nodes.values()) - _needed(ctx))


def can_be_left(ctx: JobContext, nodes: Collection[str]) -> frozenset[str]:
    """Return those of `nodes` from which the job can move away, because there are enough other nodes for all replicas.

    Nodes that new pods avoid, and nodes with a fault, do not count as other nodes. Otherwise a replica could move
    between such nodes forever.
    """
    others = {node.name for node in ctx.observed.nodes.values() if _serves(node) and not node.fault}
    others.difference_update(avoided(ctx))
    needed = _needed(ctx)
    return frozenset(node for node in nodes if len(others) - (node in others) >= needed)


def _needed(ctx: JobContext) -> int:
    """Return the number of nodes needed for all requested replicas.

    Each node is assumed to run as many replicas as the node that runs the most now.
    """
    replicas: dict[str, int] = {}
    for pod in ctx.replicas.live.values():
        if pod.node:
            replicas[pod.node] = replicas.get(pod.node, 0) + 1
    return -(-sizes.most(ctx.spec) // max(replicas.values(), default=1))


def _serves(node: NodeView) -> bool:
    return node.ready and not (node.out_of_service or node.notice or node.cordoned)


def _forgiven_early(ctx: JobContext, entry: AvoidedNode) -> AvoidedNode:
    """Return the entry of a bad node in `status.avoidedNodes`, with an earlier expiry if the job needs the node.

    The job needs the node if a pod that avoids the node has been unschedulable for some time.
    """
    if unix_seconds(entry.until) <= ctx.now or not any(entry.node in pod.avoids for pod in _stranded(ctx)):
        return entry
    return entry.model_copy(update={"until": rfc3339(ctx.now)})


def _stranded(ctx: JobContext) -> Iterable[PodView]:
    pending = [pod for pod in ctx.replicas.live.values() if pod.unschedulable and pod.avoids]
    enough = sizes.fitting(sum(pod.phase is PodPhase.RUNNING for pod in ctx.replicas.live.values()), ctx.spec)
    patience = SHORT_HANDED if enough else UNSCHEDULABLE
    return [pod for pod in pending if ctx.age(pod) >= patience]
