"""Bad nodes: which ones failed the job again and again, for how long new pods keep off them, and how strictly.

What is remembered follows from status.restarts alone. A node is never avoided by a rule where the job could not run
without it; then it is only a wish (decision "Bad nodes: a rule or a wish")."""

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
    FailureReason.SILENT_CORRUPTION: 2,
    Reason.IMAGE_UNAVAILABLE: 2,
    Reason.AGENT_NEVER_STARTED: 2,
    Reason.AGENT_CANNOT_START: 2,
    Reason.NETWORK_PARTITION: 2,
}
"""Failures that speak of the node, whatever happens on others: how much each weighs."""
NOT_OF_THE_NODE = frozenset({FailureReason.RESTORE_FAILED, *BAD_INPUTS})
ENOUGH = 2
"""Weight at which a node is avoided."""
MOST = 32
LONGEST = 86400.0
UNSCHEDULABLE = 30.0
"""Seconds without a place for a pod before a job that can't run otherwise takes its bad nodes back."""
SHORT_HANDED = 180.0
"""The same for a job that runs with fewer replicas than it wants: an autoscaler may be making a node meanwhile."""


def remember(ctx: JobContext, entries: tuple[Restart, ...]) -> tuple[AvoidedNode, ...]:
    """status.avoidedNodes, with the failures (those of the window, in order of time) that speak against a node."""
    base = ctx.spec.failure_policy.avoid_node_seconds
    entry_by_node = {
        entry.node: _forgiven_early(ctx, entry) for entry in ctx.status.avoided_nodes if _remembered(ctx, entry)
    }
    if base:
        on_node: dict[str, list[Restart]] = {}
        seen_on: dict[tuple[str, str], set[str]] = {}
        for entry in entries:
            seen_on.setdefault((entry.reason, entry.error), set()).add(entry.node)
            if entry.node:
                on_node.setdefault(entry.node, []).append(entry)
        for node, failures in on_node.items():
            weights = [(entry, weight) for entry in failures if (weight := _weight(entry, seen_on))]
            if weights and (judged := _judge(ctx, node, entry_by_node.get(node), weights, base)):
                entry_by_node[node] = judged
    latest = sorted(entry_by_node.values(), key=lambda entry: unix_seconds(entry.until))[-MOST:]
    return ctx.status.avoided_nodes if tuple(latest) == ctx.status.avoided_nodes else tuple(latest)


def _remembered(ctx: JobContext, entry: AvoidedNode) -> bool:
    return ctx.now < unix_seconds(entry.until) + ctx.spec.failure_policy.window_seconds


def _judge(
    ctx: JobContext, node: str, earlier: AvoidedNode | None, weights: list[tuple[Restart, int]], base: int
) -> AvoidedNode | None:
    """The node's new entry; None where nothing new speaks against it. While it is avoided, nothing is added."""
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


def _weight(entry: Restart, seen_on: Mapping[tuple[str, str], Collection[str]]) -> int:
    """How much a failure says against its node. One that others have seen too (`seen_on`: the nodes of each reason and
    error) says nothing, nor one from outside."""
    if entry.reason in VERDICTS:
        return VERDICTS[entry.reason]
    if (
        not entry.counted
        or entry.reason in NOT_OF_THE_NODE
        or (entry.reason == FailureReason.WORKER_SIGNALED and not entry.error)
    ):
        return 0
    return int(len(seen_on[entry.reason, entry.error]) == 1)


def events(before: JobStatus, after: JobStatus) -> tuple[Event, ...]:
    """An event for each node that is avoided from now on."""
    if before.avoided_nodes is after.avoided_nodes:
        return ()
    old_entries = {(entry.node, entry.times) for entry in before.avoided_nodes}
    return tuple(
        Event("Warning", "NodeAvoided", f"new pods keep off node {entry.node} until {entry.until}: {entry.reason}")
        for entry in after.avoided_nodes
        if (entry.node, entry.times) not in old_entries
    )


# --- where new pods may go


def avoided(ctx: JobContext) -> tuple[str, ...]:
    """Nodes that new pods keep off, the worst first."""
    active = [entry for entry in ctx.status.avoided_nodes if unix_seconds(entry.until) > ctx.now]
    return tuple(entry.node for entry in sorted(active, key=lambda entry: (-entry.times, entry.node)))


def forbidden(ctx: JobContext) -> tuple[str, ...]:
    """Of those, the nodes that the whole job fits without: for them it is a rule, for the others a wish."""
    return tuple(sorted(avoided(ctx)[: spare(ctx)]))


def spare(ctx: JobContext) -> int:
    """Nodes in service beyond those that the job needs at full size, at as many replicas a node as it has now."""
    replicas: dict[str, int] = {}
    for pod in ctx.replicas.live.values():
        if pod.node:
            replicas[pod.node] = replicas.get(pod.node, 0) + 1
    needed = -(-sizes.most(ctx.spec) // max(replicas.values(), default=1))
    usable = sum(_serves(node) for node in ctx.observed.nodes.values())
    return max(0, usable - needed)


def _serves(node: NodeView) -> bool:
    return node.ready and not (node.out_of_service or node.notice or node.cordoned)


def _forgiven_early(ctx: JobContext, entry: AvoidedNode) -> AvoidedNode:
    """Where the job, or a replica of it, finds no place without it."""
    if unix_seconds(entry.until) <= ctx.now or not any(entry.node in pod.avoids for pod in _stranded(ctx)):
        return entry
    return entry.model_copy(update={"until": rfc3339(ctx.now)})


def _stranded(ctx: JobContext) -> Iterable[PodView]:
    pending = [pod for pod in ctx.replicas.live.values() if pod.unschedulable and pod.avoids]
    enough = sizes.fitting(sum(pod.phase is PodPhase.RUNNING for pod in ctx.replicas.live.values()), ctx.spec)
    patience = SHORT_HANDED if enough else UNSCHEDULABLE
    return [pod for pod in pending if ctx.age(pod) >= patience]
