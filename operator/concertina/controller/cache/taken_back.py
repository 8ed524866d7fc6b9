"""Detection of another client that reverts this operator's writes to a job's status.

Otherwise, each write would wake the other client, for as long as both run (decision "Two operators do not write against
each other").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from concertina import backoff
from concertina.kube.resources import Raw

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
"""First and longest delay in seconds from a write that restored the last one to the next such write."""
FIRST_YIELD_SECONDS, LONGEST_YIELD_SECONDS = 300.0, 3600.0
"""First and longest time in seconds from another operator's last write until a job counts as unserved.

It applies to a job whose key this operator lacks. An operator that serves a running job writes the job's time once a
minute.
"""


@dataclass
class TakenBack:
    """Writes to one job's status by this operator and by other clients. All times are on the monotonic clock."""

    _written_conditions: frozenset[tuple[str, str, str]] | None = None
    """Conditions as this operator last wrote them."""
    _restored: int = 0
    _restored_at: float = -math.inf
    _restore_from: float = -math.inf
    """Earliest time of the next write that restores the last one."""
    _last_status: Raw | None = None
    """Status as this operator last wrote or read it."""
    _wrote_last: bool = False
    _foreign_write_at: float | None = None
    """Time at which another client's write was last noticed."""
    _reverted_count: int = 0
    """Number of this operator's writes that another client's write followed."""

    def written(self, new_status: Raw, stored: Raw, restores: bool, now: float) -> None:
        """Record a write of this operator.

        Args:
            new_status: Status that this operator sent.
            stored: Status that the API server returned.
            restores: Whether the write only repeated the last conditions.
            now: Time on the monotonic clock.
        """
        self._written_conditions, self._last_status, self._wrote_last = _conditions(new_status), stored, True
        if restores:
            self._restored = 1 if now > self._restored_at + 2 * LONGEST_SECONDS else self._restored + 1
            self._restored_at = now
            self._restore_from = now + backoff.seconds(self._restored - 1, FIRST_SECONDS, LONGEST_SECONDS)

    def restores(self, before: Raw, new_status: Raw) -> bool:
        """Return whether the write only repeats this operator's last conditions.

        This is so when another client has changed these conditions since.
        """
        last = self._written_conditions
        return last is not None and _conditions(before) != last == _conditions(new_status)

    def restore_seconds_left(self, now: float) -> float:
        """Return the number of seconds until a write that restores the last one is allowed.

        The first one need not wait.
        """
        return max(0.0, self._restore_from - now)

    def yield_seconds_left(self, status: Raw, now: float) -> float:
        """Return the number of seconds until this operator may write to a job whose key it lacks.

        By then, no other client has written to the job for long. The wait grows each time that this operator's write is
        reverted, because an operator that serves a job at rest has nothing to write.
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
