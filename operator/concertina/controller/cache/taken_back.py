"""Detection of another client that reverts this operator's writes to a job's status.

Without it, the two clients would react to each other's writes for as long as both run (decision "Two operators that
serve the same job").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from concertina import backoff
from concertina.kube.resources import Raw

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
"""Shortest and longest delay in seconds between two writes with which this operator restores a reverted status."""
FIRST_YIELD_SECONDS, LONGEST_YIELD_SECONDS = 300.0, 3600.0
"""Shortest and longest time in seconds without writes of another operator after which this operator serves a job.

This applies to jobs whose master key this operator lacks. Another operator that serves a running job updates the times
in the status every minute.
"""


@dataclass
class TakenBack:
    """Record of the writes to one job's status by this operator and by other clients. All times are monotonic."""

    _written_conditions: frozenset[tuple[str, str, str]] | None = None
    """Conditions that this operator wrote last."""
    _restored: int = 0
    _restored_at: float = -math.inf
    _restore_from: float = -math.inf
    """Earliest time at which this operator may next restore reverted conditions."""
    _last_status: Raw | None = None
    """Status that this operator last wrote or read."""
    _wrote_last: bool = False
    _foreign_write_at: float | None = None
    """Time at which a write of another client was last noticed."""
    _reverted_count: int = 0
    """Number of times that another client wrote the status after a write of this operator."""

    def written(self, new_status: Raw, stored: Raw, restores: bool, now: float) -> None:
        """Record that this operator has written the status.

        Args:
            new_status: Status that this operator sent.
            stored: Status that the API server returned.
            restores: Whether the write only restored conditions that another client had reverted.
            now: Monotonic time in seconds.
        """
        self._written_conditions, self._last_status, self._wrote_last = _conditions(new_status), stored, True
        if restores:
            self._restored = 1 if now > self._restored_at + 2 * LONGEST_SECONDS else self._restored + 1
            self._restored_at = now
            self._restore_from = now + backoff.seconds(self._restored - 1, FIRST_SECONDS, LONGEST_SECONDS)

    def restores(self, before: Raw, new_status: Raw) -> bool:
        """Return whether writing `new_status` would only restore the conditions that this operator wrote last.

        This is the case if another client has changed these conditions since (they differ in `before`).
        """
        last = self._written_conditions
        return last is not None and _conditions(before) != last == _conditions(new_status)

    def restore_seconds_left(self, now: float) -> float:
        """Return the seconds until this operator may next restore conditions that another client has reverted.

        The first restoration may happen at once, so the result is then 0.
        """
        return max(0.0, self._restore_from - now)

    def yield_seconds_left(self, status: Raw, now: float) -> float:
        """Return the seconds until this operator may write to a job whose master key it lacks.

        Another operator may serve that job, so this operator writes only after a long time without writes of other
        clients. A short time is not enough, because an operator that serves an idle job writes only after another
        client changes the job. The time becomes longer each time that another client writes after a write of this
        operator.
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
