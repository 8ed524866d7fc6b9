"""Advice on what a user should do next about a job. Pure."""

from __future__ import annotations

from concertina.api.status import ConditionType, JobStatus
from concertina.diagnosis import problems

SLOW_PERCENT = 100 * (1 - problems.FREQUENT_FAILURES)
"""Goodput in percent below which a job counts as slow."""
SOON = 600
"""Age of a job in seconds before which it does not count as slow.

Before that age, the time to start the job dominates its goodput.
"""


def next_step(name: str, status: JobStatus) -> str:
    """Return a sentence on what a user should do next about the job."""
    if status.is_true(ConditionType.FAILED):
        return f"`concertina logs {name} --since-failure` shows the output around the failure"
    if status.is_true(ConditionType.COMPLETE):
        return _after_the_end(name, status)
    if status.trouble:
        return f"you must act: the message of the condition {status.trouble.type} says what to change"
    if status.is_true(ConditionType.SUSPENDED):
        return f"`concertina resume {name}` continues it"
    if not status.is_true(ConditionType.RUNNING):
        return f"`kubectl get pods -l concertina.dev/job={name}` and the events show what it waits for"
    if status.restarts.total and status.restarts.budget <= problems.RESTARTS_REMAINING:
        return f"one more failure may end it: `concertina logs {name} --since-failure`, `concertina diagnose {name}`"
    if status.stragglers:
        return f"the others wait for {status.stragglers[0].replica}: `concertina diagnose {name}` says why"
    if is_slow(status):
        return f"`concertina diagnose {name}` shows what takes the time"
    return f"nothing to do; `concertina logs {name} -f` follows its output"


def _after_the_end(name: str, status: JobStatus) -> str:
    if status.last_checkpoint is None:
        return f"`concertina logs {name}` shows its output"
    return f"`concertina checkpoint show {status.last_checkpoint.uri}` shows what it contains"


def is_slow(status: JobStatus) -> bool:
    """Return whether a job's goodput (the share of its time in which it makes new steps) is too low.

    The result is False if the goodput is unknown.
    """
    percent = status.goodput.percent
    return percent is not None and percent < SLOW_PERCENT and sum(status.goodput.by_class.values()) > SOON
