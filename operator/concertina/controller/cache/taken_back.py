"""Detect that another client takes back what this operator writes to a job's status: each write would wake the other
one, for as long as both are there (decision "Two operators do not write against each other")."""

from __future__ import annotations

import math
from dataclasses import dataclass

from concertina import backoff
from concertina.kube.resources import Raw

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
"""From a write that restored the last one to the next that does."""
FIRST_YIELD_SECONDS, LONGEST_YIELD_SECONDS = 300.0, 3600.0
"""From another operator's last write until a job whose key this operator lacks counts as nobody's. An operator that
serves a running job counts its time once a minute."""


@dataclass
class TakenBack:
    """The writes to one job's status, by this operator and by other clients. All times are on the monotonic clock."""

    _said: frozenset[tuple[str, str, str]] | None = None
    """The conditions as this operator last wrote them."""
    _restored: int = 0
    _restored_at: float = -math.inf
    _restore_from: float = -math.inf
    """Earliest time of the next write that restores the last one."""
    _seen: Raw | None = None
    """The status as this operator last wrote or saw it."""
    _wrote_last: bool = False
    _foreign_at: float | None = None
    """When another client's write was last noticed."""
    _undone: int = 0

    def written(self, wanted: Raw, stored: Raw, restores: bool, now: float) -> None:
        self._said, self._seen, self._wrote_last = _said(wanted), stored, True
        if restores:
            self._restored = 1 if now > self._restored_at + 2 * LONGEST_SECONDS else self._restored + 1
            self._restored_at = now
            self._restore_from = now + backoff.seconds(self._restored - 1, FIRST_SECONDS, LONGEST_SECONDS)

    def restores(self, before: Raw, wanted: Raw) -> bool:
        """Return whether that write only repeats what this operator said last, and another client has changed since."""
        return self._said is not None and _said(before) != self._said == _said(wanted)

    def restore_seconds_left(self, now: float) -> float:
        """Until a write that restores the last one may be made. The first one need not wait."""
        return max(0.0, self._restore_from - now)

    def yield_seconds_left(self, status: Raw, now: float) -> float:
        """Until this operator may write to a job whose key it lacks: nobody else has written to it for long. It waits
        ever longer where its words were taken back, as an operator that serves a job at rest has nothing to write."""
        if self._seen is None:
            self._seen = status
        if status != self._seen:
            self._seen, self._foreign_at = status, now
            self._undone += self._wrote_last
            self._wrote_last = False
        if self._foreign_at is None:
            return 0.0
        patience = min(FIRST_YIELD_SECONDS * 2.0 ** min(max(0, self._undone - 1), 32), LONGEST_YIELD_SECONDS)
        return max(0.0, self._foreign_at + patience - now)


def _said(status: Raw) -> frozenset[tuple[str, str, str]]:
    return frozenset((c["type"], c["status"], c.get("reason", "")) for c in status.get("conditions") or ())
