"""Problems behind failures, by the reason of a failure or by its last lines.

The reason counts if it tells the problem. Otherwise, the first pattern that matches the last lines counts. These lines
are sentences of a script, its libraries or the trainer.
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
}
"""Problems by the reason of a failure. Alerts use the same reasons."""
_SIGNS = (
    (Problem.LOSS_NAN, re.compile(r"the loss is (nan|-?inf)|gradient's norm (nan|-?inf)")),
    (Problem.LOSS_SPIKE, re.compile(r"the loss is [\d.]+, and was [\d.]+ before")),
    (Problem.CORRUPT_STATE, re.compile(r"is damaged")),
    (Problem.STORAGE_REFUSES, re.compile(r"[Nn]o space left|There is no room left|Disk quota exceeded|StorageError")),
    (Problem.MEMORY_GROWS, re.compile(r"CUDA out of memory")),
)
"""Patterns for failures whose reason tells no problem.

Examples are a trainer that stops at a bad loss, a snapshot that can't be restored, and messages of any script.
"""


def problem_of(reason: str, *lines: str) -> Problem | None:
    """Return the problem behind a failure, or None if it is not known.

    Args:
        reason: Reason of the failure.
        *lines: Message and last lines of the failure.
    """
    text = "\n".join(lines)
    return REASONS.get(reason) or next((problem for problem, sign in _SIGNS if sign.search(text)), None)


def problem_at_end(evidence: JobEvidence) -> Problem | None:
    """Return the problem of a job that has failed, by its condition Failed or else by its last failure."""
    condition, failure = evidence.status.true_condition(ConditionType.FAILED), evidence.status.last_failure
    problem = problem_of(condition.reason, condition.message) if condition else None
    if problem is None and failure is not None:
        problem = problem_of(failure.reason, failure.message, *failure.last_lines)
    return problem
