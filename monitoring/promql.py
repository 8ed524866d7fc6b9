"""Expressions of PromQL that dashboards and alerts have in common.

A job's metrics are made of its status by whichever operator acts. After a restart or a change of the leader they go on
under another pod's name, so they are taken without it: as the most of what is there.
"""

from __future__ import annotations

from concertina.diagnosis import problems

JOB = ("namespace", "trainingjob")
TIME = "concertina_trainingjob_time_seconds_total"
TRAINING = "|".join(problems.TRAINING)
"""Classes of the time in which ranks train: what a part of the time of training is a part of."""
LOST = "recovery|replayed"
UNKNOWN = "unknown"
"""The class of the time in which workers of a script run that has reported no step."""
RECENT = "$__rate_interval"
"""Grafana's word for a window that holds some scrapes, and no less than a pixel."""


def by(*labels: str) -> str:
    return f"by ({', '.join((*JOB, *labels))})"


def of_jobs(metric: str, *labels: str, where: str = "", ago: str = "") -> str:
    """A metric of each job, with these labels beside the job's; `where`: matchers."""
    selected = f"{metric}{{{where}}}" if where else metric
    return f"max {by(*labels)} ({selected}{f' offset {ago}' if ago else ''})"


def grown(metric: str, *labels: str, where: str = "", window: str) -> str:
    """By how much it grew within the window. Not `increase`: time can move to another class, which takes that for a
    counter that began anew, and a restart of the operator is no reset."""
    now, before = of_jobs(metric, *labels, where=where), of_jobs(metric, *labels, where=where, ago=window)
    return f"clamp_min({now} - {before}, 0)"


def grown_from_nothing(metric: str, *labels: str, where: str = "", window: str) -> str:
    """The same where a series begins when there is something to tell: of a job that was there before, it was 0."""
    now, before = of_jobs(metric, *labels, where=where), of_jobs(metric, *labels, where=where, ago=window)
    was_there = f"on ({', '.join(JOB)}) {of_jobs('concertina_trainingjob_info', where=where, ago=window)}"
    return f"clamp_min({now} - ({before} or 0 * {now} and {was_there}), 0)"
