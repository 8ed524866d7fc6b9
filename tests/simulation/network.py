"""Who reaches whom, and how long it takes. Hosts are node names, operators' names, "s3" and "api"."""

from __future__ import annotations

from simulation.clock import Clock


class Network:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.unruly = False
        """Whether messages are lost, doubled and held up."""
        self._cuts: dict[frozenset[str], float] = {}
        self._since: dict[frozenset[str], float] = {}
        self._isolated: dict[str, float] = {}
        self.dead: set[str] = set()
        """Hosts that are switched off: nothing answers, not even with a refusal."""

    def cut(self, a: str, b: str, seconds: float) -> None:
        pair = frozenset((a, b))
        if self._cuts.get(pair, 0.0) <= self.clock.now:
            self._since[pair] = self.clock.now
        self._cuts[pair] = self.clock.now + seconds

    def apart_at(self, a: str, b: str, at: float) -> bool:
        """Whether they are cut off from each other now, and have been since before `at`."""
        pair = frozenset((a, b))
        return self._cuts.get(pair, 0.0) > self.clock.now and self._since[pair] < at

    def isolate(self, host: str, seconds: float) -> None:
        self._isolated[host] = self.clock.now + seconds

    def reaches(self, a: str, b: str) -> bool:
        if a in self.dead or b in self.dead:
            return False
        if a == b:
            return True
        now = self.clock.now
        if self._isolated and (self._isolated.get(a, 0.0) > now or self._isolated.get(b, 0.0) > now):
            return False
        return not self._cuts or self._cuts.get(frozenset((a, b)), 0.0) <= now

    def delay(self) -> float:
        if self.unruly and self.clock.chance(0.03):
            return self.clock.between(0.1, 2.0)
        return self.clock.between(0.001, 0.01)

    def loses(self) -> bool:
        return self.unruly and self.clock.chance(0.01)

    def doubles(self) -> bool:
        return self.unruly and self.clock.chance(0.03)

    def heal(self) -> None:
        self._cuts.clear()
        self._isolated.clear()
        self.unruly = False
