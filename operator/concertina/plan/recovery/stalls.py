"""Committed rounds that hang, train slowly or can't be reached.

The coordinator is the agent of rank 0. The coordinator detects hangs, in which no rank makes a step, and stragglers
(ranks that are slower than the others). This module finds two more problems: agents that are silent although Kubernetes
reports their pods as running, and storage that fails. The operator reports most of these problems as Stalled or
Degraded, because a person may have to act. After a hang, the operator starts a new round. The operator replaces a
straggler if the spec asks for that.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import concertina_protocol as protocol
from concertina.amounts import amount
from concertina.api.restarts import LONGEST_MESSAGE, Restart
from concertina.api.spec import Reaction
from concertina.api.status import ConditionType, StragglerMark, rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Failure, Phase, Pods, Reason
from concertina.plan.facts.health import EvidenceSource, HealthVerdict, Life
from concertina.plan.pods.pod_plan import delete, same_replica
from concertina_protocol import StorageHealth

FRAMES, THREADS = 4, 3
"""Number of stack frames, and of threads, that a message about a hang shows."""


def hung(ctx: JobContext) -> Failure | None:
    """Return a failure for the hang that the coordinator reports; None if `failurePolicy.onHang` is Report.

    The user may change `onHang` while the round hangs. Each planning pass therefore decides again (decision "The
    coordinator finds a hang, the operator acts on it").

    The coordinator is the agent of rank 0.
    """
    report = ctx.round.report
    if report is None or report.hang is None or ctx.spec.failure_policy.on_hang is Reaction.REPORT:
        return None
    hang = report.hang
    reason, error = Reason.HANG if hang.replica else Reason.COLLECTIVE_HANG, f"hangs while {hang.phase}"
    return Failure(reason, hang_sentence(ctx, hang), hang.replica, counted=True, error=error, step=hang.step)


def annotate_hang(ctx: JobContext, decision: Decision) -> Decision:
    """Report a hang in the condition Stalled and in an event, if the operator does not end the round that hangs."""
    report = ctx.round.report
    if decision.phase is not Phase.TRAINING or report is None or report.hang is None:
        return decision
    message = hang_sentence(ctx, report.hang)
    last_condition = ctx.status.condition(ConditionType.STALLED)
    is_reported = last_condition is not None and (last_condition.reason, last_condition.message) == (
        Reason.HANG,
        message,
    )
    events = () if is_reported else (Event("Warning", Reason.HANG, message),)
    return replace(decision, stalled=Reason.HANG, stalled_message=message, events=(*decision.events, *events))


def hang_sentence(ctx: JobContext, hang: protocol.Hang) -> str:
    """Describe a hang in one sentence, which does not change while the hang lasts."""
    since = f"no rank has moved for {hang.seconds:.0f} s after step {hang.step}"
    if not hang.replica:
        how = f"all {hang.suspects} workers wait in the same way ({hang.phase or 'at the same place'})"
        return f"{since}: {how}{_collective(hang.collective)}{_stack(hang)}"
    node = f" on node {name}" if (name := ctx.node_of(hang.replica)) else ""
    does = f" is {hang.phase}" if hang.phase else " is behind"
    description_of_others = f" while the others are {hang.others}" if hang.others and hang.others != hang.phase else ""
    suffix = f" (and {hang.suspects - 1} more like it)" if hang.suspects > 1 else ""
    who = f"rank {hang.rank} (replica {hang.replica}{node})"
    return f"{since}: {who}{does}{description_of_others}{suffix}{_collective(hang.collective)}{_stack(hang)}"


def _collective(hung: protocol.HungCollective | None) -> str:
    """Return a clause that names the collective that does not complete, and the ranks that have not called it."""
    if hung is None:
        return ""
    operation = f"{hung.operation} (number {hung.number} in process group {hung.group})"
    more = f" and {hung.missing_count - len(hung.missing)} more" if hung.missing_count > len(hung.missing) else ""
    missing = f"{_ranks(hung.missing)}{more}"
    if hung.instead:
        return f"; {missing} called {hung.instead} instead of {operation}, for which {_waiting(hung.waiting)}"
    if hung.missing:
        return f"; {missing} did not call {operation}, for which {_waiting(hung.waiting)}"
    if hung.silent:
        return f"; {operation} does not complete, and the flight recorder of {_ranks(hung.silent)} does not answer"
    return f"; all its ranks called {operation}, but it does not complete"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _waiting(count: int) -> str:
    return f"{amount(count, 'rank')} {'waits' if count == 1 else 'wait'}"


def _stack(hang: protocol.Hang) -> str:
    threads = [text for thread in _threads(hang.stack) if (text := " < ".join(_frames(thread)))][:THREADS]
    if not threads:
        return ""
    where = f"; all of it is in the log of pod {hang.replica}" if hang.replica else ""
    return f"; stack, innermost first: {'; another thread: '.join(threads)}{where}"


def _threads(lines: Iterable[str]) -> Iterator[list[str]]:
    thread: list[str] = []
    for line in lines:
        if line.startswith(("Current thread", "Thread")):
            yield thread
            thread = []
        thread.append(line)
    yield thread


def _frames(lines: list[str]) -> list[str]:
    frames = (_frame(line) for line in lines)
    return [frame[:120] for frame in frames if frame][:FRAMES]


def _frame(line: str) -> str:
    """Return function, file name and line number from a line such as `File "/folder/file.py", line 1 in function`.

    The result is empty for any other line. The function uses no regular expression, because its time could grow with
    the square of the line's length.
    """
    _, _, remainder = line.partition('File "')
    path, _, remainder = remainder.partition('", line ')
    number, _, function = remainder.partition(" in ")
    return f"{function} ({path.rpartition('/')[2]}:{number})" if function and number.isdecimal() else ""


# --- stragglers

MOST_STRAGGLERS = 16
STRAGGLER_REPLACEMENTS = 3
"""Largest number of times that a straggler's pod is replaced within `failurePolicy.windowSeconds`.

If the replica is still slow after that, on several nodes, the nodes are not the cause.
"""


def straggler_marks(ctx: JobContext) -> tuple[StragglerMark, ...]:
    """Return the new value of `status.stragglers`: the ranks that are slower than the others.

    The value stays unchanged until this operator has received a report of the coordinator (the agent of rank 0).
    """
    old, report = ctx.status.stragglers, ctx.round.report
    if not ctx.round.committed or report is None:
        return old if ctx.round.committed else ()
    mark_by_rank = {(mark.rank, mark.replica): mark for mark in old}
    marks = tuple(_mark(ctx, straggler, mark_by_rank) for straggler in report.stragglers if straggler.rank >= 0)
    return old if marks[:MOST_STRAGGLERS] == old else marks[:MOST_STRAGGLERS]


def _mark(
    ctx: JobContext, straggler: protocol.Straggler, mark_by_rank: dict[tuple[int, str], StragglerMark]
) -> StragglerMark:
    return mark_by_rank.get((straggler.rank, straggler.replica)) or StragglerMark(
        rank=straggler.rank,
        replica=straggler.replica,
        node=ctx.node_of(straggler.replica),
        seconds=straggler.seconds,
        others_seconds=straggler.others,
        since=rfc3339(round(ctx.now, 3)),
    )


def annotate_stragglers(ctx: JobContext, decision: Decision) -> Decision:
    """Report the stragglers (slow ranks) of a round that trains.

    The first straggler is replaced if the spec asks for that.
    """
    marks = straggler_marks(ctx)
    if decision.phase is not Phase.TRAINING or decision.unchanged or not marks:
        return decision
    message = "; ".join((decision.message, *map(straggler_sentence, marks[:3])))
    new_marks = [mark for mark in marks if mark not in ctx.status.stragglers]
    events = tuple(Event("Warning", Reason.STRAGGLER, straggler_sentence(mark)) for mark in new_marks[:3])
    decision = replace(decision, message=message, events=(*decision.events, *events))
    return _straggler_replaced(ctx, decision, marks[0])


def straggler_sentence(mark: StragglerMark) -> str:
    node = f" on node {mark.node}" if mark.node else ""
    return (
        f"rank {mark.rank} (replica {mark.replica}{node}) is a straggler: its own work takes {mark.seconds:.2g} "
        f"s per step, and that of the other ranks {mark.others_seconds:.2g} s"
    )


def _straggler_replaced(ctx: JobContext, decision: Decision, mark: StragglerMark) -> Decision:
    """Delete the pod of a straggler, if the spec asks for that and the job can continue without the pod.

    In a drain, all ranks stop after the same step. The deletion drains the round, so no step is lost. The straggler's
    entry in `status.restarts` makes new pods avoid the node (decision "Stragglers are found by their own work time").
    """
    pod = ctx.replicas.pods.get(mark.replica)
    if ctx.spec.failure_policy.on_straggler is Reaction.REPORT or pod is None or pod.deleting or decision.restart:
        return decision
    entries = [entry for entry in ctx.recent if entry.reason == Reason.STRAGGLER]
    earlier_entries = [entry for entry in entries if same_replica(entry.replica, mark.replica)]
    if len(earlier_entries) >= STRAGGLER_REPLACEMENTS and earlier_entries[-1].replica != mark.replica:
        why = f"{STRAGGLER_REPLACEMENTS} pods before it were slow as well"
        return replace(decision, message=f"{decision.message}; it is not replaced: {why}")
    if not sizes.fitting(len(ctx.replicas.ready | ctx.round.members.keys()) - 1, ctx.spec):
        return replace(decision, message=f"{decision.message}; it is not replaced: the job can't continue without it")
    entry = Restart(
        at=rfc3339(ctx.now),
        replica=pod.name,
        node=pod.node,
        reason=Reason.STRAGGLER,
        step=ctx.round.step,
        counted=False,
        message=straggler_sentence(mark)[:LONGEST_MESSAGE],
    )
    return replace(
        decision,
        restart=entry,
        actions=(*decision.actions, *delete(ctx, pod, "is a straggler")),
    )


# --- agents that can't be reached (decision "Silence alone does not count as a failure")

UNREACHABLE = "AgentsUnreachable"
ONE_BY_ONE = (
    "its replacement waits: the operator replaces silent pods at a limited rate (one in 10 s per namespace, and "
    "six a minute in all namespaces)"
)
UNREACHABLE_REMEDY = (
    "Look for a NetworkPolicy or a firewall between the operator and the agents' port of the job's pods; a pod whose "
    "agent hangs is replaced once it is deleted"
)


def annotate_unreachable(ctx: JobContext, decision: Decision) -> Decision:
    """Report agents that have been silent for UNHEARD seconds without any sign that they have failed."""
    if decision.stalled or decision.pods is not Pods.WANTED or (verdict := _unheard(ctx)) is None:
        return decision
    message = f"{_unreachable_sentence(ctx, verdict)}. {UNREACHABLE_REMEDY}"
    last_trouble = ctx.status.trouble
    events = () if last_trouble and last_trouble.reason == UNREACHABLE else (Event("Warning", UNREACHABLE, message),)
    goes_on = verdict.evidence is EvidenceSource.MEMBERS
    return replace(
        decision,
        stalled=UNREACHABLE,
        stalled_message=message,
        goes_on=goes_on,
        events=(*decision.events, *events),
    )


def _unheard(ctx: JobContext) -> HealthVerdict | None:
    if ctx.round.committed:
        verdicts = [ctx.health.coordinator]
    else:
        verdicts = [ctx.health.by_contact(pod) for pod in ctx.replicas.live.values()]
    silent = (verdict for verdict in verdicts if verdict.life is Life.SILENT)
    return next((verdict for verdict in silent if verdict.age is not None and verdict.age >= constants.UNHEARD), None)


def _unreachable_sentence(ctx: JobContext, verdict: HealthVerdict) -> str:
    since = f"since {rfc3339(ctx.now - (verdict.age or 0.0))}"
    if verdict.evidence is EvidenceSource.MEMBERS:
        coordinator = ctx.round.coordinator.replica
        return (
            f"the coordinator {coordinator} has not been reached {since}; the other members still reach it, "
            "so the round continues"
        )
    heard = "no agent of this job has been reached" if ctx.health.no_agent_reachable else "an agent was not reached"
    if verdict.waits:
        return f"{heard} {since}, while Kubernetes says that its pod runs: {ONE_BY_ONE}"
    why = (
        f"{heard} {since}, while Kubernetes says that the pods run: the operator does not replace them, "
        "because they may still be training"
    )
    if ctx.observed.operator_isolated:
        why += "; most other jobs have not been reached either, so the operator itself may be cut off"
    return why


# --- storage that fails


def annotate_storage(ctx: JobContext, decision: Decision) -> Decision:
    """Report a round that waits for data from storage as Stalled, and one that can't write checkpoints as Degraded."""
    report = ctx.round.report
    if report is None or decision.stalled:
        return decision
    waits_for = report.progress.waits_for if report.progress else ""
    if waits_for and decision.phase in (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING):
        message = f"training waits for data: {waits_for}"
        return replace(decision, stalled="DataUnavailable", stalled_message=message)
    if report.storage is not None and report.storage.state == StorageHealth.ERROR and decision.phase is Phase.TRAINING:
        message = f"training continues, but no checkpoint can be written: {report.storage.message}"
        return replace(decision, stalled="StorageUnavailable", stalled_message=message, goes_on=True)
    return decision
