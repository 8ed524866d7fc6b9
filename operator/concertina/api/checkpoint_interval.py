"""Planned time between two checkpoints of a job."""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus, unix_seconds


def checkpoint_interval(spec: JobSpec | None, status: JobStatus) -> float | None:
    """Return the planned seconds between two checkpoints of the job.

    This is the shorter of the intervals that follow from `everySeconds` and from `everySteps`. The result is None if
    the job has no checkpoints, or if the interval is not known yet. The duration of a step is that of the last reported
    step. If the interval is `Auto`, the result is the value that the workers have chosen.
    """
    return min(filter(None, _intervals(spec, status)), default=None)


def unsaved_seconds(spec: JobSpec | None, status: JobStatus, at: float) -> float | None:
    """Return the age of the newest checkpoint in seconds, for a comparison with the checkpoint interval.

    The result is None if there is no checkpoint. If the interval is a time, the age is the time since the newest
    checkpoint. If the interval is a number of steps, only the time of the steps since this checkpoint counts, and time
    in which the job was suspended does not count.

    Args:
        spec: Spec of the job; None if it is invalid.
        status: Status of the job.
        at: Time up to which to count, in Unix seconds.

    Raises:
        ValueError: When the time of the newest checkpoint is invalid.
    """
    newest, progress = status.last_checkpoint, status.progress
    if newest is None:
        return None
    age = max(0.0, at - unix_seconds(newest.at))
    by_clock, by_steps = _intervals(spec, status)
    if progress is None or not by_steps or 0 < by_clock < by_steps:
        return age
    return min(age, max(0, progress.step - newest.step) * (progress.step_seconds or 0.0))


def _intervals(spec: JobSpec | None, status: JobStatus) -> tuple[float, float]:
    """Return the checkpoint intervals in seconds that follow from `everySeconds` and from `everySteps`.

    An interval is 0 if it is not requested or not known.
    """
    if spec is None or spec.checkpoint is None:
        return 0.0, 0.0
    checkpoint, reported, progress = spec.checkpoint, status.checkpoint_interval, status.progress
    by_clock = (
        reported.seconds
        if reported
        else checkpoint.every_seconds
        if isinstance(checkpoint.every_seconds, int | float)
        else 0.0
    )
    by_steps = (checkpoint.every_steps or 0) * ((progress.step_seconds if progress else None) or 0.0)
    return by_clock, by_steps
