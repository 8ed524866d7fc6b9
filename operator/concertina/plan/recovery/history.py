"""Failures in a row: those between which the job made no progress."""

from __future__ import annotations

from concertina.api.status import Restart
from concertina.plan.facts.look import Look

SLACK = 1
"""Steps that are no progress: ranks end a step one after the other, so one failure may be seen at either."""
EARLY = 120.0
"""Of a job that tells no steps: a round that failed sooner than this many seconds after its start did nothing."""


def since_progress(look: Look, failed: Restart) -> tuple[Restart, ...]:
    """Of status.restarts, in order of time, those after which no progress was made until `failed`."""
    row: list[Restart] = []
    later = failed
    for entry in reversed(look.recent):
        if progressed(look, entry, later):
            break
        row.append(entry)
        later = entry
    return tuple(reversed(row))


def progressed(look: Look, earlier: Restart, later: Restart) -> bool:
    """Whether the round that ended with `later` got beyond the point where `earlier` failed."""
    if look.spec.bundled or look.status.progress is not None:
        return later.step > earlier.step + SLACK
    return later.after_seconds > EARLY
