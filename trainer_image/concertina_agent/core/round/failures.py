"""Descriptions of the failures of a round, and selection of the failure that is the cause.

The module has no side effects.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Optional

from concertina_agent.core.events import WorkerExited
from concertina_protocol import BAD_INPUTS, LONGEST_LAST_LINE, MOST_LAST_LINES, Failure, FailureReason
from concertina_protocol.lost_peer import LOST_PEER
from concertina_protocol.messages.reports import OUT_OF_MEMORY
from concertina_protocol.worker_channel import BAD_INPUT_EXIT, Fault

TRACEBACK = "Traceback (most recent call last):"
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")

UNPROVOKED = frozenset(
    {
        FailureReason.WORKER_SIGNALED,
        FailureReason.OUT_OF_MEMORY,
        FailureReason.WORKER_STOPPED,
        FailureReason.MEMBER_LOST,
        *BAD_INPUTS,
        FailureReason.START_FAILED,
        FailureReason.LOSS_SPIKE,
        FailureReason.LOSS_NOT_FINITE,
        FailureReason.SILENT_CORRUPTION,
    }
)
"""Reasons that are never a consequence of the loss of a peer."""

LONGEST, LONGEST_BRIEF, TOGETHER = 1000, 200, 60_000
"""Limits in characters of a failure's sentence with output, of one without, and of all sentences in a round together.

A Report contains each sentence twice, in the state of its member and among the failures. The operator derives its limit
on the lines of an agent from these numbers, for any encoding (`concertina.agents.bounds`).
"""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_exception(lines: Sequence[str]) -> str:
    """Return the last line of the last traceback in some output, or "" if there is no traceback.

    The traceback need not be at the end: libraries may have written more lines to stderr.
    """
    begins = [i for i, line in enumerate(lines) if TRACEBACK in line]
    if not begins:
        return ""
    prefix = lines[begins[-1]].partition(TRACEBACK)[0]  # torch.distributed writes the rank before each line
    rest = (line[len(prefix) :] for line in lines[begins[-1] + 1 :] if line.startswith(prefix))
    return next((line for line in rest if EXCEPTION.match(line)), "")


def worker_failure(
    replica: str, ended: WorkerExited, fault: Optional[Fault], step: Optional[int], at: float
) -> Failure:
    """Return the Failure of a worker that exited without success."""
    rank, code, last_lines, permanent = ended.rank, ended.code, ended.last_lines, False
    if fault is not None:
        reason, message = fault.reason, f"Rank {rank} (exit code {code}): {fault.message[:LONGEST]}"
        permanent = reason in BAD_INPUTS and code == BAD_INPUT_EXIT
    elif code < 0 and ended.out_of_memory:
        reason = FailureReason.OUT_OF_MEMORY
        message = f"Rank {rank} was killed by {signal_name(-code)}: {OUT_OF_MEMORY}."
    elif code < 0:
        reason, message = FailureReason.WORKER_SIGNALED, f"Rank {rank} was killed by {signal_name(-code)}."
    elif code == 0:
        reason = FailureReason.WORKER_EXITED_EARLY
        message = f"Rank {rank} exited with code 0 before the run was complete."
    else:
        last = _last_exception(last_lines) or ended.last_error
        last = last or next((line for line in reversed(last_lines) if line.strip()), "")
        reason = FailureReason.WORKER_FAILED
        message = f"Rank {rank} exited with code {code}" + (f": {last.strip()[:500]}" if last else ".")
    rollback = fault.rollback if fault else None
    return Failure(replica, reason, message, last_lines, rank, code, step, permanent, at=at, rollback=rollback)


def worker_stopped(replica: str, rank: int, step: Optional[int], at: float) -> Failure:
    """Return the Failure of a worker that a signal such as SIGSTOP has suspended.

    Only the agent of the worker's pod can detect this failure.
    """
    message = f"Rank {rank} is stopped (by SIGSTOP or a similar signal), so the other ranks can't continue."
    return Failure(replica, FailureReason.WORKER_STOPPED, message, rank=rank, step=step, at=at)


def looks_provoked(failure: Failure) -> bool:
    """Return whether a failure looks like a consequence of a lost connection to another rank.

    The result is True if the worker's output names a lost connection, or if a watchdog in the worker's process has
    aborted the worker.
    """
    if failure.reason == FailureReason.WORKER_SIGNALED:
        return -failure.exit_code == signal.SIGABRT
    if failure.reason in UNPROVOKED:
        return False
    return any(sign in line for line in failure.last_lines for sign in LOST_PEER)


def mark(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures of a round, and set `secondary` in each failure that is a consequence of the cause.

    The failures are given in order of arrival. When one rank dies, the other ranks fail too, and often report their
    failures first (decision "The cause of a failed round"). So the cause is the first failure that can't be a
    consequence of a lost connection to another rank. Without such a failure, the cause is the first failure that does
    not look like a consequence, or else the first failure.
    """
    ordered = tuple(failures)
    cause = min(range(len(ordered)), key=lambda i: (looks_provoked(ordered[i]), ordered[i].reason not in UNPROVOKED))
    return tuple(
        dataclasses.replace(
            f,
            secondary=i != cause and (looks_provoked(f) or f.reason not in UNPROVOKED),
            provoked=looks_provoked(f),
        )
        for i, f in enumerate(ordered)
    )


def better(previous: Optional[Failure], new: Failure) -> Failure:
    """Return the more informative one of two failures of the same replica."""
    return new if previous is None or (looks_provoked(previous) and not looks_provoked(new)) else previous


def told(failures: Iterable[Failure], members: int) -> tuple[Failure, ...]:
    """Return the failures of a round as the coordinator (the agent of rank 0) reports them to the operator.

    Only two kinds of failures include the workers' output: the cause, and failures that no new round can repair. The
    output of all failures would not fit into a Report (decision "Reports contain all fields"). The pods' logs have the
    output of all workers.
    """
    marked = mark(failures)
    cause = next(failure for failure in marked if not failure.secondary)
    shown = (cause, next((failure for failure in marked if failure.permanent), cause))
    return tuple(
        whole(failure) if any(failure is shown_failure for shown_failure in shown) else brief(failure, members)
        for failure in marked
    )


def whole(failure: Failure) -> Failure:
    """Return the failure with the worker's output, shortened to the lines and characters that the operator stores."""
    lines = [line.rstrip()[:LONGEST_LAST_LINE] for line in failure.last_lines if line.strip()]
    return dataclasses.replace(failure, message=failure.message[:LONGEST], last_lines=tuple(lines[-MOST_LAST_LINES:]))


def brief(failure: Failure, members: int) -> Failure:
    """Return the failure without the worker's output, and with a shortened message.

    The message is shortened so that the messages of `members` failures fit into one Report to the operator.
    """
    return dataclasses.replace(
        failure, message=failure.message[: min(LONGEST_BRIEF, TOGETHER // members)], last_lines=()
    )
