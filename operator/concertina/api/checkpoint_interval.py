"""How far apart the checkpoints of a job are meant to be."""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus, unix_seconds


def checkpoint_interval(spec: JobSpec | None, status: JobStatus) -> float | None:
    """Seconds: the shorter of what the clock and the steps come to. None without checkpoints, and where it is not known
    yet: steps are as long as the last one told of, and `Auto` is what training has made of it."""
    return min(filter(None, _intervals(spec, status)), default=None)


def unsaved_seconds(spec: JobSpec | None, status: JobStatus, at: float) -> float | None:
    """Seconds that the next checkpoint has been waited for: since the newest one, or, where steps say when the next is
    due, what those since then took. A job that was suspended over night has missed none. `at`: Unix seconds. None
    without a checkpoint. Raises ValueError where its time is none."""
    newest, progress = status.last_checkpoint, status.progress
    if newest is None:
        return None
    age = max(0.0, at - unix_seconds(newest.at))
    by_clock, by_steps = _intervals(spec, status)
    if progress is None or not by_steps or 0 < by_clock < by_steps:
        return age
    return min(age, max(0, progress.step - newest.step) * (progress.step_seconds or 0.0))


def _intervals(spec: JobSpec | None, status: JobStatus) -> tuple[float, float]:
    """By the clock, and by steps; 0: not asked for, or not known."""
    if spec is None or spec.checkpoint is None:
        return 0.0, 0.0
    every, told, progress = spec.checkpoint, status.checkpoint_interval, status.progress
    by_clock = told.seconds if told else every.every_seconds if isinstance(every.every_seconds, int | float) else 0.0
    by_steps = (every.every_steps or 0) * ((progress.step_seconds if progress else None) or 0.0)
    return by_clock, by_steps
