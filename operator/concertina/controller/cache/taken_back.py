"""Detect another client that reverts this operator's writes to a job's status.

Without this detection, the two clients would react to each other's writes for as long as both run (decision "Two
operators that serve the same job").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from concertina import backoff
from concertina.kube.resources import Raw

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
"""Shortest and longest delay in seconds between two writes that repeat a reverted write."""
FIRST_YIELD_SECONDS, LONGEST_YIELD_SECONDS = 300.0, 3600.0
"""Shortest and longest time in seconds after another operator's last write until a job counts as not served by it.

This applies to jobs whose master key this operator lacks. An operator that serves a running job writes its time every
minute.
"""


@dataclass
class TakenBack:
    """Record of the writes to one job's status by this operator and by other clients. All times are monotonic."""

    _written_conditions: frozenset[tuple[str, str, str]] | None = None
    """Conditions that this operator wrote last."""
    _restored: int = 0
    _restored_at: float = -math.inf
    _restore_from: float = -math.inf
    """Earliest time for the next write that repeats a reverted write."""
    _last_status: Raw | None = None
    """Status that this operator last wrote or read."""
    _wrote_last: bool = False
    _foreign_write_at: float | None = None
    """Time at which a write of another client was last noticed."""
    _reverted_count: int = 0
    """Number of this operator's writes after which another client wrote."""

    def written(self, new_status: Raw, stored: Raw, restores: bool, now: float) -> None:
        """Record that this operator has written the status.

        Args:
            new_status: Status that this operator sent.
            stored: Status that the API server returned.
            restores: Whether the write only repeated conditions that another client had reverted.
            now: Monotonic time.
        """
        self._written_conditions, self._last_status, self._wrote_last = _conditions(new_status), stored, True
        if restores:
            self._restored = 1 if now > self._restored_at + 2 * LONGEST_SECONDS else self._restored + 1
            self._restored_at = now
            self._restore_from = now + backoff.seconds(self._restored - 1, FIRST_SECONDS, LONGEST_SECONDS)

    def restores(self, before: Raw, new_status: Raw) -> bool:
        """Return whether a write would only set the conditions to what this operator wrote last.

        Such a write is needed if another client has changed these conditions in the meantime.
        """
        last = self._written_conditions
        return last is not None and _conditions(before) != last == _conditions(new_status)

    def restore_seconds_left(self, now: float) -> float:
        """Return the seconds until this operator may again write conditions that another client has reverted.

        For the first such write, the result is 0.
        """
        return max(0.0, self._restore_from - now)

    def yield_seconds_left(self, status: Raw, now: float) -> float:
        """Return the seconds until this operator may write to a job whose master key it lacks.

        Another operator may serve that job. This operator therefore writes only if no other client has written to the
        job for a long time. An operator that serves an idle job writes only after another client changes the job, so a
        short wait is not enough. The waiting time grows each time another client writes after a write of this operator.
        """
        if self._last_status is None:
            self._last_status = status
        if status != self._last_status:
            self._last_status, self._foreign_write_at = status, now
            self._reverted_count += self._wrote_last
            self._wrote_last = False
        if self._foreign_write_at is None:
            return 0.0
        patience = min(FIRST_YIELD_SECONDS * 2.0 ** min(max(0, self._reverted_count - 1), 32), LONGEST_YIELD_SECONDS)
        return max(0.0, self._foreign_write_at + patience - now)


def _conditions(status: Raw) -> frozenset[tuple[str, str, str]]:
    return frozenset((c["type"], c["status"], c.get("reason", "")) for c in status.get("conditions") or ())
