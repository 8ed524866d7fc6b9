"""Schedule of a run's faults as data: drawn from a seed, and reduced to find a shorter story."""

from __future__ import annotations

import dataclasses
import random

from simulation.faults.table import ANOMALIES, CALM, CALM_MORE, CONDITIONS, FAULTS, MORE, STARVE

SPAN = 40.0
"""Seconds within which faults occur; then everything is repaired."""
ANOMALOUS = 0.25
"""Probability that training itself goes wrong, within the seconds in which most jobs train."""
TRAINING = (2.0, 25.0)
OFTEN = 0.35
"""Probability that some of MORE occur, or of STARVE."""


@dataclasses.dataclass(frozen=True)
class Strike:
    """One fault, or one condition of the whole run (then `at` is 0)."""

    at: float
    name: str
    """Name in the tables of `faults`."""
    key: int
    """Key of the fault's own random generator, so that its targets and durations do not depend on the other faults."""

    @property
    def random(self) -> random.Random:
        return random.Random(self.key)


Schedule = tuple[Strike, ...]


def draw(seed: int, calm: bool) -> Schedule:
    """Draw a schedule.

    With `calm`, only the operator is disturbed once training is under way, which must have no effect.
    """
    chance = random.Random(f"faults of {seed}")

    def strike(at: float, name: str) -> Strike:
        return Strike(at, name, chance.getrandbits(32))

    conditions = () if calm else tuple(name for name, likely in CONDITIONS.items() if chance.random() < likely)
    table = CALM if calm else FAULTS
    at = sorted(chance.uniform(0.0, SPAN) for _ in range(chance.randint(0, 8)))
    struck = [strike(when, chance.choice(table)) for when in at]
    if not calm and chance.random() < ANOMALOUS:
        times = [chance.uniform(*TRAINING) for _ in range(chance.randint(1, 3))]
        struck += [strike(when, chance.choice(ANOMALIES)) for when in times]
    struck += _apart(f"more faults of {seed}", CALM_MORE if calm else MORE)
    struck += () if calm else _apart(f"starved nodes of {seed}", STARVE)
    return (*(strike(0.0, name) for name in conditions), *sorted(struck, key=lambda strike: strike.at))


def _apart(source: str, table: tuple[str, ...]) -> list[Strike]:
    """Draw faults from a separate random generator, so that the other faults of a seed stay the same."""
    chance = random.Random(source)
    count = chance.randint(1, 2) if chance.random() < OFTEN else 0
    return [Strike(chance.uniform(*TRAINING), chance.choice(table), chance.getrandbits(32)) for _ in range(count)]


def one_death(seed: int) -> Strike:
    """Return the death of a worker that trains."""
    return Strike(5.0 + seed % 4, "kill_worker", seed)


def twice(seed: int, seconds: float, table: tuple[str, ...] = FAULTS) -> Schedule:
    """Draw the death of a worker, and a second failure at most `seconds` later; none if the table is empty."""
    chance, first = random.Random(f"second failure of {seed}"), one_death(seed)
    if not table:
        return (first,)
    return first, Strike(first.at + chance.uniform(0.0, seconds), chance.choice(table), chance.getrandbits(32))
