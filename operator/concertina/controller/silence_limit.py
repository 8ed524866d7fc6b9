"""Limit on how many pods the operator counts as dead only because their agents are silent.

Decision "Silent pods are replaced at a limited rate" gives the reason.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

NAMESPACE_SECONDS = 10.0
"""Shortest interval in seconds between two silent pods of one namespace that begin to count as dead."""
PER_MINUTE, MINUTE = 6, 60.0
"""Largest number of silent pods, over all namespaces, that begin to count as dead within MINUTE seconds."""
REMEMBERED_SECONDS = 600.0
"""Seconds for which a pod that counts as dead lowers the precedence of its namespace.

When pods of several namespaces wait, the namespace with the fewest such pods comes first.
"""
LATE_SECONDS = 5.0
"""Seconds by which a namespace may call `ask` too late without losing its place among the waiting namespaces."""


class SilenceLimit:
    """Limit on the rate at which silent pods begin to count as dead.

    The limit is one pod in 10 s for each namespace, and six pods in a minute for all namespaces together. If pods of
    several namespaces wait, the namespace with the fewest pods in the last ten minutes comes first, so that no
    namespace uses up the limit of the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._granted: deque[tuple[float, str]] = deque()
        """Time at which each pod began to count as dead, with the pod's namespace."""
        self._waiting: dict[str, float] = {}
        """Waiting namespaces in the order of their first request, with the time after which each loses its place."""

    def ask(self, namespace: str) -> float:
        """Return 0.0 if a silent pod of the namespace may count as dead from now on, and record that it does.

        Otherwise, return the seconds after which to call this method again.
        """
        now = self._clock()
        while self._granted and self._granted[0][0] <= now - REMEMBERED_SECONDS:
            self._granted.popleft()
        self._waiting = {name: until for name, until in self._waiting.items() if until > now}
        wait = max(self._own_wait(namespace, now), self._common_wait(namespace, now))
        if wait > 0.0:
            self._waiting[namespace] = now + wait + LATE_SECONDS
            return wait
        self._waiting.pop(namespace, None)
        self._granted.append((now, namespace))
        return 0.0

    def _own_wait(self, namespace: str, now: float) -> float:
        last = max((granted_at for granted_at, name in self._granted if name == namespace), default=-math.inf)
        return last + NAMESPACE_SECONDS - now

    def _common_wait(self, namespace: str, now: float) -> float:
        """Return the seconds until a pod of `namespace` may count as dead under the limit for all namespaces."""
        names = list(self._waiting)
        if namespace not in self._waiting:
            names.append(namespace)
        due = [name for name in names if name == namespace or self._own_wait(name, now) <= 0.0]
        rank = sorted(due, key=self._count).index(namespace)
        recent = [granted_at for granted_at, _ in self._granted if granted_at > now - MINUTE]
        free = PER_MINUTE - len(recent)
        if rank < free:
            return 0.0
        return recent[rank - free] + MINUTE - now if rank - free < len(recent) else NAMESPACE_SECONDS

    def _count(self, namespace: str) -> int:
        return sum(name == namespace for _, name in self._granted)
