"""A limit on the pods that are given up for silence alone (decision "Pods are given up for silence one by one")."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

NAMESPACE_SECONDS = 10.0
"""From one pod of a namespace to the next."""
PER_MINUTE, MINUTE = 6, 60.0
"""Pods of all namespaces, within any such time."""
REMEMBERED_SECONDS = 600.0
"""For how long a pod counts when it is decided which namespace comes first."""
LATE_SECONDS = 5.0
"""By which a namespace that waits may be late with its next question and keep its place."""


class SilenceLimit:
    """One pod in 10 s for each namespace, and six a minute in all. Where more are wanted, the namespace that has lost
    the fewest comes first, so that no namespace uses up what others need."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._granted: deque[tuple[float, str]] = deque()
        """When, and to which namespace."""
        self._waiting: dict[str, float] = {}
        """Namespaces, in the order in which they first asked; until when each of them keeps its place."""

    def ask(self, namespace: str) -> float:
        """Seconds until the namespace should ask again; 0.0 where a pod of it may be given up now, which counts it."""
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
        last = max((at for at, name in self._granted if name == namespace), default=-math.inf)
        return last + NAMESPACE_SECONDS - now

    def _common_wait(self, namespace: str, now: float) -> float:
        """Until there is a place for it after those that come first."""
        names = list(self._waiting)
        if namespace not in self._waiting:
            names.append(namespace)
        due = [name for name in names if name == namespace or self._own_wait(name, now) <= 0.0]
        place = sorted(due, key=self._count).index(namespace)
        recent = [at for at, _ in self._granted if at > now - MINUTE]
        free = PER_MINUTE - len(recent)
        if place < free:
            return 0.0
        return recent[place - free] + MINUTE - now if place - free < len(recent) else NAMESPACE_SECONDS

    def _count(self, namespace: str) -> int:
        return sum(name == namespace for _, name in self._granted)
