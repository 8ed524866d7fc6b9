"""Common PromQL expressions of dashboards and alerts.

The acting operator computes a job's metrics from the job's status. After a restart or a change of the leader, they
continue under another pod's name. The expressions therefore ignore the pod's name, and take the maximum of the series.
"""

from __future__ import annotations

from concertina.diagnosis import problems

JOB = ("namespace", "trainingjob")
TIME = "concertina_trainingjob_time_seconds_total"
TRAINING = "|".join(problems.TRAINING)
"""Classes of the time in which ranks train. Shares of the training time refer to their sum."""
LOST = "recovery|replayed"
UNKNOWN = "unknown"
"""Class of the time in which a script's workers run before the script has reported a step."""
RECENT = "$__rate_interval"
"""Grafana's variable for a window that contains several scrapes and is at least a pixel wide."""


def by(*labels: str) -> str:
    return f"by ({', '.join((*JOB, *labels))})"


def of_jobs(metric: str, *labels: str, where: str = "", ago: str = "") -> str:
    """Return a PromQL expression for a metric of each job.

    The result has the labels `labels` in addition to the labels of the job. `where` contains label matchers, and `ago`
    an offset in time.
    """
    selected = f"{metric}{{{where}}}" if where else metric
    return f"max {by(*labels)} ({selected}{f' offset {ago}' if ago else ''})"


def grown(metric: str, *labels: str, where: str = "", window: str) -> str:
    """Return a PromQL expression for the growth of a metric within the window.

    The expression does not use `increase`. Time can move to another class, which `increase` would take for a counter
    reset, and a restart of the operator is no reset.
    """
    now, before = of_jobs(metric, *labels, where=where), of_jobs(metric, *labels, where=where, ago=window)
    return f"clamp_min({now} - {before}, 0)"


def grown_from_nothing(metric: str, *labels: str, where: str = "", window: str) -> str:
    """Return the same expression as `grown`, but for a series that begins with its first event.

    For a job that existed before that event, the earlier value was 0.
    """
    now, before = of_jobs(metric, *labels, where=where), of_jobs(metric, *labels, where=where, ago=window)
    was_there = f"on ({', '.join(JOB)}) {of_jobs('concertina_trainingjob_info', where=where, ago=window)}"
    return f"clamp_min({now} - ({before} or 0 * {now} and {was_there}), 0)"
