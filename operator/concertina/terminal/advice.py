"""Advice on what a user should do next about a job. Pure."""

from __future__ import annotations

from concertina.api.status import ConditionType, JobStatus
from concertina.diagnosis import problems

SLOW_PERCENT = 100 * (1 - problems.FREQUENT_FAILURES)
"""Goodput in percent below which the user should find out what takes the time."""
SOON = 600
"""Minimum age of a job's goodput in seconds.

Before that age, the job's start dominates, and the job is not called slow.
"""


def next_step(name: str, status: JobStatus) -> str:
    """Return a sentence on what a user should do next about the job."""
    if status.is_true(ConditionType.FAILED):
        return f"`concertina logs {name} --since-failure` has what was printed around the failure"
    if status.is_true(ConditionType.COMPLETE):
        return _after_the_end(name, status)
    if status.trouble:
        return f"a person must act: the message of the condition {status.trouble.type} says what to change"
    if status.is_true(ConditionType.SUSPENDED):
        return f"`concertina resume {name}` lets it go on"
    if not status.is_true(ConditionType.RUNNING):
        return f"`kubectl get pods -l concertina.dev/job={name}` and the events say what it waits for"
    if status.restarts.total and status.restarts.budget <= problems.RESTARTS_REMAINING:
        return f"one more failure may end it: `concertina logs {name} --since-failure`, `concertina diagnose {name}`"
    if status.stragglers:
        return f"the others wait for {status.stragglers[0].replica}: `concertina diagnose {name}` says why"
    if is_slow(status):
        return f"`concertina diagnose {name}` names what takes the time"
    return f"nothing to do; `concertina logs {name} -f` shows it at work"


def _after_the_end(name: str, status: JobStatus) -> str:
    if status.last_checkpoint is None:
        return f"`concertina logs {name}` has its output"
    return f"`concertina checkpoint show {status.last_checkpoint.uri}` has what was trained"


def is_slow(status: JobStatus) -> bool:
    """Return whether too little of a job's time is spent on new steps.

    The result is False if the goodput is unknown.
    """
    percent = status.goodput.percent
    return percent is not None and percent < SLOW_PERCENT and sum(status.goodput.by_class.values()) > SOON
