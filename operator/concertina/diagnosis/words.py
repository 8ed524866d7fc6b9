"""Find the problem that caused a failure, from the failure's reason or its last lines of output.

The reason has precedence. If the reason does not determine the problem, the first pattern that matches the last lines
does. These lines come from a script, its libraries or the trainer.
"""

from __future__ import annotations

import re

from concertina.api.status import ConditionType
from concertina.diagnosis.evidence import JobEvidence
from concertina.diagnosis.problems import Problem
from concertina_protocol import FailureReason

REASONS: dict[str, Problem] = {
    FailureReason.LOSS_NOT_FINITE: Problem.LOSS_NAN,
    FailureReason.LOSS_SPIKE: Problem.LOSS_SPIKE,
    FailureReason.DATA_CHANGED: Problem.DATA_DIGEST_MISMATCH,
    FailureReason.DAMAGED: Problem.CORRUPT_STATE,
    FailureReason.SILENT_CORRUPTION: Problem.CORRUPT_STATE,
    FailureReason.OUT_OF_MEMORY: Problem.MEMORY_GROWS,
    "Hang": Problem.HANG,
    "CollectiveHang": Problem.HANG,
}
"""Problem for each reason of a failure. The alerts use the same reasons."""
_SIGNS = (
    (Problem.LOSS_NAN, re.compile(r"the loss is (nan|-?inf)|gradient's norm (nan|-?inf)")),
    (Problem.LOSS_SPIKE, re.compile(r"the loss is [\d.]+; the mean before was [\d.]+")),
    (Problem.CORRUPT_STATE, re.compile(r"is damaged")),
    (Problem.STORAGE_REFUSES, re.compile(r"[Nn]o space left|There is no room left|Disk quota exceeded|StorageError")),
    (Problem.MEMORY_GROWS, re.compile(r"CUDA out of memory")),
)
"""Patterns in the output of a failure, each with the problem that it identifies.

The patterns are used if the failure's reason does not determine the problem. They match, for example, the output of a
trainer that stops because of a bad loss, of a snapshot that can't be restored, and of user scripts.
"""


def problem_of(reason: str, *lines: str) -> Problem | None:
    """Return the problem that caused a failure, or None if it is unknown.

    Args:
        reason: Reason of the failure.
        *lines: Message and last lines of the failure.
    """
    text = "\n".join(lines)
    return REASONS.get(reason) or next((problem for problem, sign in _SIGNS if sign.search(text)), None)


def problem_at_end(evidence: JobEvidence) -> Problem | None:
    """Return the problem because of which a failed job ended; None if it is unknown.

    The condition Failed has precedence over the last failure.
    """
    condition, failure = evidence.status.true_condition(ConditionType.FAILED), evidence.status.last_failure
    problem = problem_of(condition.reason, condition.message) if condition else None
    if problem is None and failure is not None:
        problem = problem_of(failure.reason, failure.message, *failure.last_lines)
    return problem
