"""How far apart the checkpoints of a job are meant to be."""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus


def checkpoint_interval(spec: JobSpec | None, status: JobStatus) -> float | None:
    """Seconds: the shorter of what the clock and the steps come to. None without checkpoints, and where it is not known
    yet: steps are as long as the last one told of, and `auto` is what training has made of it."""
    if spec is None or spec.checkpoint is None:
        return None
    every, told, progress = spec.checkpoint, status.checkpoint_interval, status.progress
    by_clock = told.seconds if told else every.every_seconds if isinstance(every.every_seconds, int | float) else 0.0
    by_steps = (every.every_steps or 0) * ((progress.step_seconds if progress else None) or 0.0)
    return min(filter(None, (by_clock, by_steps)), default=None)
