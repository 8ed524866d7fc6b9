"""The problem behind a failure: by its reason, where that says it. Else by its last words, which are sentences of a
script, its libraries or the trainer: the first that fits counts."""

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
"""Alerts go by the same."""
_SIGNS = (
    (Problem.LOSS_NAN, re.compile(r"the loss is (nan|-?inf)|gradient's norm (nan|-?inf)")),
    (Problem.LOSS_SPIKE, re.compile(r"the loss is [\d.]+, and was [\d.]+ before")),
    (Problem.CORRUPT_STATE, re.compile(r"is damaged")),
    (Problem.STORAGE_REFUSES, re.compile(r"[Nn]o space left|There is no room left|Disk quota exceeded|StorageError")),
    (Problem.MEMORY_GROWS, re.compile(r"CUDA out of memory")),
)
"""What has no reason of its own: a trainer that stops at a bad loss, a snapshot that can't be restored, and what any
script may say."""


def problem_of(reason: str, *said: str) -> Problem | None:
    """`said`: lines."""
    text = "\n".join(said)
    return REASONS.get(reason) or next((problem for problem, sign in _SIGNS if sign.search(text)), None)


def problem_at_end(seen: JobEvidence) -> Problem | None:
    """Of a job that has failed: by what it failed for, else by its last failure."""
    ended, failure = seen.status.true_condition(ConditionType.FAILED), seen.status.last_failure
    found = problem_of(ended.reason, ended.message) if ended else None
    if found is None and failure is not None:
        found = problem_of(failure.reason, failure.message, *failure.last_lines)
    return found
