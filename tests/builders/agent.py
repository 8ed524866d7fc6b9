"""One agent and a clock, for tests of its rules."""

from __future__ import annotations

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_protocol import worker_channel as w

UID = "u"
NAMES = ("a", "b", "c")


def member(name: str, rank: int, workers: int = 1) -> p.Member:
    return p.Member(name, f"{name}-1", f"{name}:1", rank, workers)


def assignment(*names: str, round: int = 1, restore: p.Restore | None = None) -> p.Assign:
    members = tuple(member(name, rank) for rank, name in enumerate(names))
    return p.Assign(UID, round, f"claim-{round}", members, "a:9", restore or p.Restore("Fresh"))


def prepare(round: int = 1, claim: str = "", names: tuple[str, ...] = NAMES) -> p.Prepare:
    return p.Prepare(UID, round, claim or f"claim-{round}", tuple(p.Candidate(name, f"{name}:1") for name in names))


def snapshot(round: int, step: int, shards: int = 3) -> p.SnapshotId:
    return p.SnapshotId(round, step, "layout", shards)


def join(name: str, round: int = 1, instance: str = "") -> p.Join:
    return p.Join(UID, round, f"claim-{round}", name, instance or f"{name}-1")


class Driver:
    """One core and a clock."""

    def __init__(self, name: str = "a", *, bundled: bool = True, **known) -> None:
        self.core = AgentState(name, UID, f"{name}-1", 1, bundled=bundled, **known)
        self.now, self._requests = 100.0, 0

    def tell(self, event: e.Event) -> list[e.Effect]:
        effects = machine.step(self.core, event, self.now, 1000.0)
        assert not any(isinstance(effect, e.IllegalTransition) for effect in effects), effects
        return effects

    def wait(self, seconds: float) -> list[e.Effect]:
        """Let time pass with ticks, as a running agent has them.

        Return the effects of the last tick, at the end of the time.
        """
        until = self.now + seconds
        while self.now < until - 0.25:
            self.now += 0.25
            self.tell(e.Tick())
        self.now = until
        return self.tell(e.Tick())

    def ask(self, message: e.Request) -> list[e.Effect]:
        self._requests += 1
        return self.tell(e.RequestReceived(self._requests, message))

    def answer(self, message: e.Request) -> object:
        """Return the immediate reply, or None if there is none."""
        return next((effect.message for effect in self.ask(message) if isinstance(effect, e.Reply)), None)

    def prepared(self, round: int = 1, held: tuple[p.HeldSnapshot, ...] | None = None) -> p.Prepared:
        message = prepare(round)
        self.ask(message)
        self.tell(e.StoreBound(round, message.claim, "here:9"))
        self.tell(e.Reached(message, NAMES))
        effects = self.tell(e.WorkersGone(round, held))
        return next(effect.message for effect in effects if isinstance(effect, e.Reply))

    def begun(self, *names: str, round: int = 1, restore: p.Restore | None = None) -> list[e.Effect]:
        self.prepared(round)
        return self.ask(assignment(*names, round=round, restore=restore))

    def say(self, message: w.Message, rank: int = 0, round: int = 1) -> list[e.Effect]:
        return self.tell(e.WorkerMessage(round, rank, message))

    def ended(self, code: int, *lines: str, rank: int = 0, round: int = 1) -> list[e.Effect]:
        return self.tell(e.WorkerExited(round, rank, code, lines))

    def member_says(self, name: str, state: str, round: int = 1, **more) -> list[e.Effect]:
        return self.tell(e.MemberMessage(p.MemberState(name, f"{name}-1", round, f"claim-{round}", state, **more)))

    @property
    def report(self) -> p.Report:
        return self.core.report()


def kinds(effects: list[e.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def exits(effects: list[e.Effect]) -> list[int]:
    return [effect.code for effect in effects if isinstance(effect, e.Exit)]
