"""Network: which hosts reach each other, and with which delays. Hosts are nodes, operators, "s3" and "api"."""

from __future__ import annotations

from simulation.parts.clock import Clock

Way = tuple[str, str]
"""Pair of the sending and the receiving host."""


class Network:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.unruly = False
        """Whether messages are lost, doubled and delayed."""
        self._lost: dict[Way, float] = {}
        """Time until which messages from one host to the other are lost."""
        self._closed: dict[Way, float] = {}
        """Time until which one host can't open a connection to the other, as with a firewall that allows only one
        direction. Open connections stay open."""
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
        """Return since when no connection can be opened in this direction; None if one can."""
        ends = max(self._lost.get(way, 0.0), self._closed.get(way, 0.0))
        return self._since[way] if ends > self.clock.now else None

    def apart_at(self, a: str, b: str, at: float) -> bool:
        """Return whether one of the hosts can't call the other now, and has not been able to since before `at`."""
        return any((since := self.apart_since(way)) is not None and since < at for way in ((a, b), (b, a)))

    def isolate(self, host: str, seconds: float) -> None:
        self._isolated[host] = self.clock.now + seconds

    def carries(self, sender: str, receiver: str) -> bool:
        """Return whether a message on an open connection arrives."""
        if sender in self.dead or receiver in self.dead:
            return False
        if sender == receiver:
            return True
        now = self.clock.now
        if self._isolated and (self._isolated.get(sender, 0.0) > now or self._isolated.get(receiver, 0.0) > now):
            return False
        return not self._lost or self._lost.get((sender, receiver), 0.0) <= now

    def talk(self, a: str, b: str) -> bool:
        """Return whether an open connection between the hosts works in both directions."""
        return self.carries(a, b) and (not self._lost or self.carries(b, a))

    def reaches(self, caller: str, called: str) -> bool:
        """Return whether one host can open a connection to the other."""
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
