"""Intended time between the checkpoints of a job."""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus, unix_seconds


def checkpoint_interval(spec: JobSpec | None, status: JobStatus) -> float | None:
    """Return the seconds between checkpoints: the shorter of the intervals by the clock and by steps.

    The result is None without checkpoints, and if the interval is not known yet. A step is taken to be as long as the
    last one reported, and `Auto` is the interval that training has chosen.
    """
    return min(filter(None, _intervals(spec, status)), default=None)


def unsaved_seconds(spec: JobSpec | None, status: JobStatus, at: float) -> float | None:
    """Return the seconds for which the next checkpoint has been waited for; None without a checkpoint.

    They are counted from the newest checkpoint. If steps decide when the next one is due, they are the time that the
    steps since then took, so a job that was suspended overnight has missed none.

    Args:
        spec: Spec of the job; None if it is invalid.
        status: Status of the job.
        at: Time until which to count, in Unix seconds.

    Raises:
        ValueError: When the time of the newest checkpoint is not a valid time.
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
    """Return the intervals by the clock and by steps; 0 for one that is not requested, or not known."""
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
