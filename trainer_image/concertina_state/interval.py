"""Interval between checkpoints in durable storage.

A shorter interval costs more time for saves, and a longer one loses more time at a failure (decision "everySeconds:
Auto is Daly's estimate").
"""

from __future__ import annotations

import math
import time

from concertina_protocol import CheckpointInterval, JobHistory

SHORTEST, UNKNOWN_COST = 10.0, 1.0
"""Shortest interval between checkpoints, and the assumed cost of a save before one is measured, both in seconds."""


def best(cost: float, between_failures: float) -> float:
    """Return the seconds between saves for which the time lost to saves and failures is shortest.

    The formula is from Daly 2006, A higher order estimate of the optimum checkpoint interval, eq. 37. Its first term is
    Young's formula of 1974. `cost` is the number of seconds that training waits for a save. `between_failures` is the
    mean number of seconds between failures.
    """
    if cost >= 2 * between_failures:
        return between_failures
    ratio = cost / (2 * between_failures)
    return math.sqrt(2 * cost * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class Interval:
    """Interval between the checkpoints of one round.

    `seconds` is the value in spec.checkpoint. If that value is `Auto`, `seconds` is the best interval according to the
    measurements so far.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, setting: int | str | None, history: JobHistory) -> None:
        self._setting, self._history = setting, history
        self._began = time.monotonic()
        self._cost = self._shipping = 0.0
        self._wanted_at: float | None = None

    def saved(self, cost: float) -> None:
        """Record that training has waited `cost` seconds for a checkpoint's snapshot.

        The upload of the checkpoint begins now.
        """
        self._cost, self._wanted_at = max(self._cost, cost), time.monotonic()

    def shipped(self) -> None:
        """Record that the upload of a checkpoint has ended, so that its duration is known."""
        if self._wanted_at is not None:
            self._shipping = max(self._shipping, time.monotonic() - self._wanted_at)
            self._wanted_at = None

    @property
    def between_failures(self) -> float:
        """Mean seconds between failures.

        The mean is computed as if another failure happened now.
        """
        return (self._history.seconds + time.monotonic() - self._began) / (self._history.failures + 1)

    @property
    def suggested(self) -> float:
        return max(SHORTEST, self._shipping, best(self._cost or UNKNOWN_COST, max(1.0, self.between_failures)))

    @property
    def seconds(self) -> float | None:
        """Seconds between checkpoints, or None if the spec sets the interval in steps."""
        return self.suggested if self._setting == "Auto" else None if self._setting is None else float(self._setting)

    @property
    def reported(self) -> CheckpointInterval:
        failures, seconds = round(self.between_failures, 1), self.seconds
        seconds = None if seconds is None else round(seconds, 1)
        return CheckpointInterval(seconds, round(self.suggested, 1), self._cost, failures)
