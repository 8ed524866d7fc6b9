"""From a worker's end to a Failure with a sentence, and which of a round's failures is the cause. Pure."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Optional

from concertina_agent.core.events import WorkerExited
from concertina_protocol import BAD_INPUTS, LONGEST_LAST_LINE, MOST_LAST_LINES, Failure, FailureReason
from concertina_protocol.messages.reports import OUT_OF_MEMORY
from concertina_protocol.worker_channel import BAD_INPUT_EXIT, Fault

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "recvValue failed",
    "remote process exited",
    "NCCL communicator was aborted",
    "Socket Timeout",
    "Timed out waiting",
)
"""What gloo, NCCL and the store say, in the last lines of output, when another rank has gone."""

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
"""Reasons that do not come from the loss of a peer."""

LONGEST, LONGEST_BRIEF, TOGETHER = 1000, 200, 60_000
"""Characters of a failure's sentence: where its output is shown, where it is not, and of all sentences of a round. A
Report says each twice, as that of its member and among the failures. The operator bounds an agent's lines by them,
whatever they are written in (`concertina.agents.bounds`)."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exception(lines: Sequence[str]) -> str:
    """What the last traceback ends with; empty without one. Libraries may have said goodbye on stderr after it."""
    begins = [i for i, line in enumerate(lines) if TRACEBACK in line]
    if not begins:
        return ""
    prefix = lines[begins[-1]].partition(TRACEBACK)[0]  # torch.distributed puts the rank in front of each line
    rest = (line[len(prefix) :] for line in lines[begins[-1] + 1 :] if line.startswith(prefix))
    return next((line for line in rest if EXCEPTION.match(line)), "")


def worker_failure(
    replica: str, ended: WorkerExited, fault: Optional[Fault], step: Optional[int], at: float
) -> Failure:
    """Why a worker that did not end well did so."""
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
        last = _exception(last_lines) or ended.last_error
        last = last or next((line for line in reversed(last_lines) if line.strip()), "")
        reason = FailureReason.WORKER_FAILED
        message = f"Rank {rank} exited with code {code}" + (f": {last.strip()[:500]}" if last else ".")
    rollback = fault.rollback if fault else None
    return Failure(replica, reason, message, last_lines, rank, code, step, permanent, at=at, rollback=rollback)


def worker_stopped(replica: str, rank: int, step: Optional[int], at: float) -> Failure:
    """A worker that is there and does nothing: nobody else will say so."""
    message = f"Rank {rank} is stopped (by SIGSTOP, or the like): the others wait for it in vain."
    return Failure(replica, FailureReason.WORKER_STOPPED, message, rank=rank, step=step, at=at)


def looks_provoked(failure: Failure) -> bool:
    """Its last words are those of a rank that lost a peer, or it was taken down by its own watchdog."""
    if failure.reason == FailureReason.WORKER_SIGNALED:
        return -failure.exit_code == signal.SIGABRT
    if failure.reason in UNPROVOKED:
        return False
    return any(sign in line for line in failure.last_lines for sign in LOST_PEER)


def mark(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """When one rank dies the others fail too, and often say so first (decision "Which failure is the cause"). In the
    given order of arrival: the first one that can't be provoked is the cause, else the first that does not look so,
    else the very first; `secondary` is true for what may follow from it."""
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


def better(known: Optional[Failure], new: Failure) -> Failure:
    """The one that tells more about why this replica failed."""
    return new if known is None or (looks_provoked(known) and not looks_provoked(new)) else known


def told(failures: Iterable[Failure], members: int) -> tuple[Failure, ...]:
    """Marked, for the operator. It shows the output of the cause, or of what no new round can mend; the rest is in the
    pods' logs, and would not fit into a Report (decision "Reports are whole")."""
    marked = mark(failures)
    cause = next(failure for failure in marked if not failure.secondary)
    shown = (cause, next((failure for failure in marked if failure.permanent), cause))
    return tuple(
        whole(failure) if any(failure is each for each in shown) else brief(failure, members) for failure in marked
    )


def whole(failure: Failure) -> Failure:
    """With its output, as far as the operator keeps it."""
    lines = [line.rstrip()[:LONGEST_LAST_LINE] for line in failure.last_lines if line.strip()]
    return dataclasses.replace(failure, message=failure.message[:LONGEST], last_lines=tuple(lines[-MOST_LAST_LINES:]))


def brief(failure: Failure, members: int) -> Failure:
    """Without its output, and with its share of all sentences."""
    return dataclasses.replace(
        failure, message=failure.message[: min(LONGEST_BRIEF, TOGETHER // members)], last_lines=()
    )
