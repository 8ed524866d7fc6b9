"""Type of the results of checks that have found a problem."""

from __future__ import annotations

import dataclasses
import enum

from concertina.diagnosis.problems import Problem


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    """Training does not run, produces nothing useful, or may lose a lot of work."""
    WARNING = "warning"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Problem that a check has found in a job, with its cost and advice."""

    problem: Problem
    severity: Severity
    sentence: str
    """Description of the problem, with the measured values and their period."""
    advice: str
    """Text that says what the user should try next."""
    lost: float = 0.0
    """Share of the job's time that the problem costs, from 0 to 1."""

    @property
    def runbook(self) -> str:
        return self.problem.runbook


def warning(problem: Problem, sentence: str, advice: str, lost: float = 0.0) -> Finding:
    return Finding(problem, Severity.WARNING, sentence, advice, lost)


def critical(problem: Problem, sentence: str, advice: str, lost: float = 1.0) -> Finding:
    return Finding(problem, Severity.CRITICAL, sentence, advice, lost)
