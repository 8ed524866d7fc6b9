"""Repeated failures: find failures without progress between them, and recognize bugs in the job's script.

A failure counts as a bug if it occurs again and again at the same step, regardless of the replica.
"""

from __future__ import annotations

import re
import signal

import concertina_protocol as protocol
from concertina.api.restarts import Restart
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Reason
from concertina_protocol import FailureReason

SLACK = 1
"""Number of steps by which a later failure may differ without counting as progress.

Ranks finish a step at slightly different times, so the same failure may be reported at two neighbouring steps.
"""
EARLY = 120.0
"""Seconds for which a round must have run to count as progress, for a job that reports no steps."""
TRIES = 3
"""Number of equal failures without progress that count as a bug."""
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that usually come from outside of the worker, so that they are no evidence against the script."""
OF_THE_WORKER = frozenset(
    {
        FailureReason.WORKER_FAILED,
        FailureReason.WORKER_SIGNALED,
        FailureReason.WORKER_EXITED_EARLY,
        FailureReason.START_FAILED,
        FailureReason.OUT_OF_MEMORY,
        FailureReason.LOSS_NOT_FINITE,
    }
)
"""Reasons of failures that a bug in the script can cause."""
LIKE_HARDWARE = frozenset({FailureReason.WORKER_SIGNALED, FailureReason.OUT_OF_MEMORY, Reason.HANG})
"""Reasons of failures that a bad node can cause too. They count as a bug only if they occur on several nodes."""
LONGEST = 200

_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"\b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{6,}\b"), "#"),
    (re.compile(r"(?<!exited with code )\d+(?:[.:]\d+)*"), "#"),
)
"""Patterns of text that differs between two reports of the same failure, such as addresses, uuids, ranks and times.

Exit codes are not replaced.
"""


def signature(failure: protocol.Failure) -> str:
    """Return the part of a failure's text that stays the same when the failure occurs again.

    The result is empty if the script can't be the cause, or if the next round will use other samples, so that the same
    failure would not occur again.
    """
    if failure.reason not in OF_THE_WORKER or failure.provoked or failure.rollback:
        return ""
    if failure.reason == FailureReason.WORKER_SIGNALED and -failure.exit_code in FROM_OUTSIDE:
        return ""
    return normalised(failure.message)


def normalised(text: str) -> str:
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    return text[:LONGEST]


def since_progress(ctx: JobContext, failed: Restart) -> tuple[Restart, ...]:
    """Return the earlier failures in `status.restarts` after which the job has made no progress, in order of time."""
    row: list[Restart] = []
    later = failed
    for entry in reversed(ctx.recent):
        if progressed(ctx, entry, later):
            break
        row.append(entry)
        later = entry
    return tuple(reversed(row))


def progressed(ctx: JobContext, earlier: Restart, later: Restart) -> bool:
    """Return whether training made progress between two failures: it went beyond the point of the earlier failure."""
    progress = ctx.status.progress
    if ctx.spec.bundled or (progress is not None and not progress.optimizer):
        return later.step > earlier.step + SLACK
    return later.after_seconds > EARLY


def alike(ctx: JobContext, failed: Restart) -> tuple[Restart, ...]:
    """Return the failures that equal the failure `failed`, at the same step and without progress between them.

    `failed` itself is the last one in the result.
    """
    if not failed.error:
        return (failed,)
    equal_failures = tuple(entry for entry in since_progress(ctx, failed) if _same(entry, failed))
    return (*equal_failures, failed)


def _same(entry: Restart, failed: Restart) -> bool:
    is_near = abs(entry.step - failed.step) <= SLACK
    return is_near and (entry.reason, entry.error) == (failed.reason, failed.error)


def is_bug(ctx: JobContext, failed: Restart) -> bool:
    """Return whether a failure has occurred often enough to count as a bug in the script.

    If all these failures occurred on one node, the node may be the cause. The failure then counts as a bug only if no
    other node is available, and faulty hardware does not cause failures of this kind (decision "Repeated failures that
    end the job").
    """
    failures = alike(ctx, failed)
    if len(failures) < TRIES:
        return False
    if len({entry.node for entry in failures if entry.node}) != 1:
        return True
    nodes = ctx.observed.nodes.values()
    has_other_nodes = not ctx.observed.nodes_watched or any(node.ready and node.name != failed.node for node in nodes)
    return failed.reason not in LIKE_HARDWARE and not has_other_nodes


def reason(failed: Restart) -> str:
    """Return the reason of the Failed condition for a job that ends with this failure.

    The reason is RepeatedFailure, except for a loss that is not finite: alerts and runbooks refer to that reason.
    """
    return failed.reason if failed.reason == FailureReason.LOSS_NOT_FINITE else "RepeatedFailure"


def sentence(ctx: JobContext, failed: Restart, failure_message: str) -> str:
    """Return the message of the Failed condition of a job that ends because of repeated failures.

    `failure_message` describes the last failure of the job.
    """
    times = len(alike(ctx, failed))
    where = f"at step {failed.step}" if ctx.status.progress else "soon after its start"
    saved = ctx.status.last_checkpoint
    resumes = f"; it continues from its checkpoint of step {saved.step}" if saved else ""
    if failed.reason == FailureReason.START_FAILED:
        cause = "the command of spec.template can't be started. Correct the command or the image, then"
    else:
        cause = "this looks like a bug in the script. Fix it, then"
    return (
        f"failed {times} times {where} with the same error; {cause} delete the job and create it again{resumes}. "
        f"The last failure: {failure_message}"
    )
