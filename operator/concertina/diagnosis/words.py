"""What the last words of a run's failures say. They are sentences of the trainer and its storage, or of a script's
libraries: the first that fits counts."""

from __future__ import annotations

import re

from concertina.diagnosis.evidence import Evidence
from concertina.diagnosis.problems import Problem

_SIGNS = (
    (Problem.LOSS_NAN, re.compile(r"LossNotFinite|the loss is (nan|-?inf)|gradient's norm (nan|-?inf)")),
    (Problem.LOSS_SPIKE, re.compile(r"LossSpike|the loss is [\d.]+, and was [\d.]+ before")),
    (Problem.DATA_DIGEST_MISMATCH, re.compile(r"[Bb]uild the data again|data with digest|digest of data")),
    (Problem.CORRUPT_STATE, re.compile(r"SilentCorruption|is damaged|missing or damaged|RestoreFailed|crc32")),
    (Problem.STORAGE_REFUSES, re.compile(r"[Nn]o space left|There is no room left|Disk quota exceeded|StorageError")),
    (Problem.MEMORY_GROWS, re.compile(r"OutOfMemory|ran out of memory|CUDA out of memory")),
)


def problem_in(text: str) -> Problem | None:
    return next((problem for problem, sign in _SIGNS if sign.search(text)), None)


def last(seen: Evidence) -> str:
    """Of the last failure, and what the conditions make of it."""
    failure = seen.status.last_failure
    said = [condition.message for condition in seen.status.conditions if condition.status == "True"]
    if failure is not None:
        said += [failure.reason, failure.message, *failure.last_lines]
    return "\n".join(said)
