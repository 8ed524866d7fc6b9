"""Who reaches whom, and how long it takes. Hosts are node names, operators' names, "s3" and "api"."""

from __future__ import annotations

from simulation.parts.clock import Clock

Way = tuple[str, str]
"""From whom to whom."""


class Network:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.unruly = False
        """Whether messages are lost, doubled and held up."""
        self._lost: dict[Way, float] = {}
        """Until when what one host sends does not arrive at the other."""
        self._closed: dict[Way, float] = {}
        """Until when one host can't open a connection to the other, as where a firewall lets one side call only; what
        is open stays open."""
        self._since: dict[Way, float] = {}
        self._isolated: dict[str, float] = {}
        self.dead: set[str] = set()
        """Hosts that are switched off: nothing answers, not even with a refusal."""

    def cut(self, a: str, b: str, seconds: float) -> None:
        self.lose(a, b, seconds)
        self.lose(b, a, seconds)

    def lose(self, sender: str, receiver: str, seconds: float) -> None:
        self._until(self._lost, (sender, receiver), seconds)

    def close(self, caller: str, called: str, seconds: float) -> None:
        self._until(self._closed, (caller, called), seconds)

    def _until(self, ways: dict[Way, float], way: Way, seconds: float) -> None:
        if self.apart_since(way) is None:
            self._since[way] = self.clock.now
        ways[way] = self.clock.now + seconds

    def apart_since(self, way: Way) -> float | None:
        """Since when no connection can be opened this way; None where one can."""
        ends = max(self._lost.get(way, 0.0), self._closed.get(way, 0.0))
        return self._since[way] if ends > self.clock.now else None

    def apart_at(self, a: str, b: str, at: float) -> bool:
        """Whether one of them can't call the other now, and has not been able to since before `at`."""
        return any((since := self.apart_since(way)) is not None and since < at for way in ((a, b), (b, a)))

    def isolate(self, host: str, seconds: float) -> None:
        self._isolated[host] = self.clock.now + seconds

    def carries(self, sender: str, receiver: str) -> bool:
        """Whether what is sent on an open connection arrives."""
        if sender in self.dead or receiver in self.dead:
            return False
        if sender == receiver:
            return True
        now = self.clock.now
        if self._isolated and (self._isolated.get(sender, 0.0) > now or self._isolated.get(receiver, 0.0) > now):
            return False
        return not self._lost or self._lost.get((sender, receiver), 0.0) <= now

    def talk(self, a: str, b: str) -> bool:
        """Whether an open connection between them works, both ways."""
        return self.carries(a, b) and (not self._lost or self.carries(b, a))

    def reaches(self, caller: str, called: str) -> bool:
        """Whether one can open a connection to the other."""
        if self._closed and self._closed.get((caller, called), 0.0) > self.clock.now and caller != called:
            return False
        return self.talk(caller, called)

    def delay(self) -> float:
        if self.unruly and self.clock.chance(0.03):
            return self.clock.between(0.1, 2.0)
        return self.clock.between(0.001, 0.01)

    def loses(self) -> bool:
        return self.unruly and self.clock.chance(0.01)

    def doubles(self) -> bool:
        return self.unruly and self.clock.chance(0.03)

    def heal(self) -> None:
        self._lost.clear()
        self._closed.clear()
        self._isolated.clear()
        self.unruly = False
