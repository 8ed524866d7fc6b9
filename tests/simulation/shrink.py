"""Delta debugging of a schedule of faults: leave out faults that the failure does not need, one at a time.

.venv/bin/python -m simulation.shrink SEED [SEED ...]      (with tests/ on PYTHONPATH)
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from simulation.runs.schedule import Schedule, draw
from simulation.runs.world import failure

TRIES = 4
"""Number of other random sequences to try with a shorter schedule, because one fault less changes all that follows."""


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return a part of `schedule` that still fails, and that does not fail without any one of its faults."""
    size = max(1, len(schedule) // 2)
    while True:
        for start in range(0, len(schedule), size):
            shorter = schedule[:start] + schedule[start + size :]
            if fails(shorter):
                schedule = shorter
                break
        else:
            if size == 1:
                return schedule
            size = max(1, size // 2)


def shortest(seed: int, calm: bool = False) -> str:
    """Return the story of the shortest schedule that fails like the seed does; empty if the seed does not fail."""
    whole = failure(seed, calm)
    if not whole:
        return ""
    kind = whole.kind
    found = [whole]

    def fails(schedule: Schedule) -> bool:
        for salt in range(TRIES):
            broken = failure(seed, calm, schedule, salt)
            if broken and broken.kind == kind:
                found.append(broken)
                return True
        return False

    kept = shrink(draw(seed, calm), fails)
    names = ", ".join(strike.name for strike in kept) or "none at all"
    return f"the shortest story of seed {seed} (faults: {names})\n{found[-1].story}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(shortest(int(argument)) or f"seed {argument} holds")
