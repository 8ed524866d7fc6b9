"""Conversion of a worker's end to a Failure with a sentence, and selection of the cause among a round's failures.

The module has no side effects.
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
"""Reasons that do not follow from the loss of a peer."""

LONGEST, LONGEST_BRIEF, TOGETHER = 1000, 200, 60_000
"""Maximum number of characters of a failure's sentence with and without output, and of all sentences of a round.

A Report contains each sentence twice: in its member, and among the failures. The operator limits the lines of an agent
by these numbers in any encoding (`concertina.agents.bounds`).
"""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_exception(lines: Sequence[str]) -> str:
    """Return the last line of the last traceback, or an empty string without one.

    Libraries may have written further lines to stderr after it.
    """
    begins = [i for i, line in enumerate(lines) if TRACEBACK in line]
    if not begins:
        return ""
    prefix = lines[begins[-1]].partition(TRACEBACK)[0]  # torch.distributed prefixes each line with the rank
    rest = (line[len(prefix) :] for line in lines[begins[-1] + 1 :] if line.startswith(prefix))
    return next((line for line in rest if EXCEPTION.match(line)), "")


def worker_failure(
    replica: str, ended: WorkerExited, fault: Optional[Fault], step: Optional[int], at: float
) -> Failure:
    """Return the failure of a worker that did not end successfully."""
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
    """Return the failure of a worker that exists but is stopped, which no other process reports."""
    message = f"Rank {rank} is stopped (by SIGSTOP, or the like): the others wait for it in vain."
    return Failure(replica, FailureReason.WORKER_STOPPED, message, rank=rank, step=step, at=at)


def looks_provoked(failure: Failure) -> bool:
    """Return whether the output is that of a rank that lost a peer, or the worker was aborted by its own watchdog."""
    if failure.reason == FailureReason.WORKER_SIGNALED:
        return -failure.exit_code == signal.SIGABRT
    if failure.reason in UNPROVOKED:
        return False
    return any(sign in line for line in failure.last_lines for sign in LOST_PEER)


def mark(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Mark the failures of a round, given in order of arrival.

    When one rank dies, the others fail too, and often report it first (decision "The failure that is the cause"). The
    cause is the first failure that cannot be provoked, else the first that does not look provoked, else the first of
    all. `secondary` is set for those that may follow from it.
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
    """Return the failure that says more about why this replica failed."""
    return new if previous is None or (looks_provoked(previous) and not looks_provoked(new)) else previous


def told(failures: Iterable[Failure], members: int) -> tuple[Failure, ...]:
    """Return the marked failures for the operator.

    The failures include the output of the cause, or of a failure that no new round can repair. The remaining output is
    in the pods' logs, and would not fit into a Report (decision "Reports are whole").
    """
    marked = mark(failures)
    cause = next(failure for failure in marked if not failure.secondary)
    shown = (cause, next((failure for failure in marked if failure.permanent), cause))
    return tuple(
        whole(failure) if any(failure is shown_failure for shown_failure in shown) else brief(failure, members)
        for failure in marked
    )


def whole(failure: Failure) -> Failure:
    """Return the failure with its output, as far as the operator keeps it."""
    lines = [line.rstrip()[:LONGEST_LAST_LINE] for line in failure.last_lines if line.strip()]
    return dataclasses.replace(failure, message=failure.message[:LONGEST], last_lines=tuple(lines[-MOST_LAST_LINES:]))


def brief(failure: Failure, members: int) -> Failure:
    """Return the failure without its output, and with its share of the length of all sentences."""
    return dataclasses.replace(
        failure, message=failure.message[: min(LONGEST_BRIEF, TOGETHER // members)], last_lines=()
    )
