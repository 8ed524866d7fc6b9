"""Stragglers: what the lead found, in the status and in words, and their replacement where the spec asks for it."""

from __future__ import annotations

from dataclasses import replace

import concertina_protocol as protocol
from concertina.api.restarts import LONGEST_MESSAGE, Restart
from concertina.api.spec import Reaction
from concertina.api.status import StragglerMark, rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Reason
from concertina.plan.pods.pod_plan import delete, same_replica

MOST = 16
REPLACEMENTS = 3
"""Of one replica within failurePolicy.windowSeconds: what stays slow on so many nodes is not the node's fault."""


def marks(ctx: JobContext) -> tuple[StragglerMark, ...]:
    """status.stragglers. While the lead says nothing (an operator that has just come) it stays as it was."""
    old, report = ctx.status.stragglers, ctx.round.report
    if not ctx.round.committed or report is None:
        return old if ctx.round.committed else ()
    known = {(mark.rank, mark.replica): mark for mark in old}
    found = tuple(_mark(ctx, one, known) for one in report.stragglers if one.rank >= 0)
    return old if found[:MOST] == old else found[:MOST]


def _mark(ctx: JobContext, found: protocol.Straggler, known: dict[tuple[int, str], StragglerMark]) -> StragglerMark:
    return known.get((found.rank, found.replica)) or StragglerMark(
        rank=found.rank,
        replica=found.replica,
        node=ctx.node_of(found.replica),
        seconds=found.seconds,
        others_seconds=found.others,
        since=rfc3339(round(ctx.now, 3)),
    )


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """A decision to go on, with what is to be said of stragglers, and done about the first of them."""
    found = marks(ctx)
    if decision.phase is not Phase.TRAINING or not found:
        return decision
    message = "; ".join((decision.message, *map(sentence, found[:3])))
    news = [mark for mark in found if mark not in ctx.status.stragglers]
    events = tuple(Event("Warning", Reason.STRAGGLER, sentence(mark)) for mark in news[:3])
    decision = replace(decision, message=message, events=(*decision.events, *events))
    return _replaced(ctx, decision, found[0])


def sentence(mark: StragglerMark) -> str:
    node = f" on node {mark.node}" if mark.node else ""
    return (
        f"rank {mark.rank} (replica {mark.replica}{node}) is a straggler: its own work takes {mark.seconds:.2g} s a "
        f"step, that of the others {mark.others_seconds:.2g} s"
    )


def _replaced(ctx: JobContext, decision: Decision, mark: StragglerMark) -> Decision:
    """Its pod is deleted, which drains the round, so no step is lost; the entry among the restarts has its node avoided
    (decision "Stragglers by own work")."""
    pod = ctx.replicas.pods.get(mark.replica)
    if ctx.spec.failure_policy.on_straggler is Reaction.REPORT or pod is None or pod.deleting:
        return decision
    entries = [entry for entry in ctx.recent if entry.reason == Reason.STRAGGLER]
    before = [entry for entry in entries if same_replica(entry.replica, mark.replica)]
    if len(before) >= REPLACEMENTS and before[-1].replica != mark.replica:
        why = f"{REPLACEMENTS} pods before it were slow as well"
        return replace(decision, message=f"{decision.message}; it is not replaced: {why}")
    if not sizes.fitting(len(ctx.replicas.ready | ctx.round.members.keys()) - 1, ctx.spec):
        return replace(decision, message=f"{decision.message}; it is not replaced: the job can't go on without it")
    entry = Restart(
        at=rfc3339(ctx.now),
        replica=pod.name,
        node=pod.node,
        reason=Reason.STRAGGLER,
        step=ctx.round.step,
        counted=False,
        message=sentence(mark)[:LONGEST_MESSAGE],
    )
    return replace(
        decision,
        restart=entry,
        actions=(*decision.actions, *delete(ctx, pod, "is a straggler")),
    )
