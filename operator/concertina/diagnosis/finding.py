"""What a check found."""

from __future__ import annotations

import dataclasses
import enum

from concertina.diagnosis.problems import Problem


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    """Training stands, comes to nothing, or would lose much."""
    WARNING = "warning"


@dataclasses.dataclass(frozen=True)
class Finding:
    problem: Problem
    severity: Severity
    sentence: str
    """What is wrong, with figures, and of which time they are."""
    advice: str
    """The next thing to try."""
    lost: float = 0.0
    """Part of the job's time that it costs, 0 to 1."""

    @property
    def runbook(self) -> str:
        return self.problem.runbook


def warning(problem: Problem, sentence: str, advice: str, lost: float = 0.0) -> Finding:
    return Finding(problem, Severity.WARNING, sentence, advice, lost)


def critical(problem: Problem, sentence: str, advice: str, lost: float = 1.0) -> Finding:
    return Finding(problem, Severity.CRITICAL, sentence, advice, lost)
