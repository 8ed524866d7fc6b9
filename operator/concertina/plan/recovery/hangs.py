"""Hangs: what the lead found (no rank moves, and who is behind), in words, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import concertina_protocol as protocol
from concertina.api.spec import Reaction
from concertina.api.status import ConditionType
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Reason
from concertina.plan.rounds.claims import Cause

FRAMES, THREADS = 4, 3
"""Of a stack that stand in a message."""


def hung(ctx: JobContext) -> Cause | None:
    """A cause for a new round, unless failurePolicy, which may change while the round hangs, says that hangs are only
    to be reported (decision "The lead finds a hang, the operator acts on it")."""
    report = ctx.round.report
    if report is None or report.hang is None or ctx.spec.failure_policy.on_hang is Reaction.REPORT:
        return None
    hang = report.hang
    reason, error = Reason.HANG if hang.replica else Reason.STANDSTILL, f"hangs while {hang.phase}"
    return Cause(reason, sentence(ctx, hang), hang.replica, counted=True, error=error, step=hang.step)


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """A decision to let the round go on, where it hangs: said as Stalled and in an event."""
    report = ctx.round.report
    if decision.phase is not Phase.TRAINING or report is None or report.hang is None:
        return decision
    message = sentence(ctx, report.hang)
    before = ctx.status.condition(ConditionType.STALLED)
    known = before is not None and (before.reason, before.message) == (Reason.HANG, message)
    events = () if known else (Event("Warning", Reason.HANG, message),)
    return replace(decision, stalled=Reason.HANG, stalled_message=message, events=(*decision.events, *events))


def sentence(ctx: JobContext, hang: protocol.Hang) -> str:
    """The same as long as the round hangs."""
    since = f"no rank has moved for {hang.seconds:.0f} s after step {hang.step}"
    if not hang.replica:
        return f"{since}: all {hang.suspects} wait alike ({hang.phase or 'at the same place'})" + _stack(hang)
    node = f" on node {name}" if (name := ctx.node_of(hang.replica)) else ""
    does = f" is {hang.phase}" if hang.phase else " is behind"
    others = f" while the others are {hang.others}" if hang.others and hang.others != hang.phase else ""
    more = f" (and {hang.suspects - 1} more like it)" if hang.suspects > 1 else ""
    return f"{since}: rank {hang.rank} (replica {hang.replica}{node}){does}{others}{more}" + _stack(hang)


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
    found = (_frame(line) for line in lines)
    return [frame[:120] for frame in found if frame][:FRAMES]


def _frame(line: str) -> str:
    """Function, file and line of `File "/folder/file.py", line 1 in function`; empty where it is no such line. Without
    a regular expression, which may take a time that grows with the square of the line's length."""
    _, _, place = line.partition('File "')
    path, _, place = place.partition('", line ')
    number, _, function = place.partition(" in ")
    return f"{function} ({path.rpartition('/')[2]}:{number})" if function and number.isdecimal() else ""
