"""Virtual time: a heap of future events, and the only random generator."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
START = 10_000.0
"""Time at which a run begins, in Unix seconds, late enough for clocks that are set back by an hour."""


def changed(record: T, **fields: Any) -> T:
    """Return the same as dataclasses.replace, without __init__, which would take a tenth of a run's time."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **fields)
    return copy


class Violation(AssertionError):
    """An invariant of the design does not hold."""


class Clock:
    def __init__(self, seed: int) -> None:
        self.now = START
        self.random = random.Random(seed)
        self.story: list[tuple[float, str]] = []
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._frozen: dict[object, float] = {}
        """Time until which a process is frozen, by process; its events are delayed until then."""
        self._held: dict[object, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    def freeze(self, who: object, seconds: float) -> None:
        """Delay the due methods of `who`, in order, as in a process that was stopped (SIGSTOP)."""
        self._frozen[who] = max(self._frozen.get(who, 0.0), self.now + seconds)

    def thaw(self) -> None:
        for who in self._frozen:
            self._frozen[who] = min(self._frozen[who], self.now)
        for who in list(self._held):
            self._release(who)

    def _hold(self, who: object, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if who not in self._held:
            self._held[who] = []
            self.after(self._frozen[who] - self.now, self._release, who)
        self._held[who].append((action, arguments))

    def _release(self, who: object) -> None:
        """Run the delayed methods in the order in which they came due, unless the process was frozen again."""
        for action, arguments in self._held.pop(who, ()):
            self.after(0.0, action, *arguments)

    def stands(self, who: object) -> bool:
        return self._frozen.get(who, 0.0) > self.now

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, action, arguments))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def tell(self, text: str) -> None:
        """Add a line to the story, which is printed with a seed that fails."""
        self.story.append((self.now, text))

    def run(self, until: float, over: Callable[[], bool]) -> bool:
        """Run the events, and return whether the run was over before `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(heap)
            who = getattr(action, "__self__", None)
            if self._frozen.get(who, 0.0) > self.now:
                self._hold(who, action, arguments)
                continue
            self.events += 1
            action(*arguments)
            if over():
                return True
        return over()
