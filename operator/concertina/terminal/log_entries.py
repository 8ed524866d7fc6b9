"""Lines of replicas' logs, and which round and rank each belongs to: the agent says in its own lines when it starts a
worker. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from pydantic import JsonValue

from concertina.api.status import unix_seconds
from concertina.api.world import World
from concertina_protocol import log_lines
from concertina_protocol.log_lines import StepDoneLine

_RANK = re.compile(r"\[rank (\d{1,7})\] ")
"""Which the agent puts before a line where a replica has several workers."""
_MOST = 16_384
"""Characters of a line of the agent's: a longer one is somebody else's."""


@dataclass(frozen=True)
class LogEntry:
    """One line."""

    at: str
    """When it was printed, RFC 3339; empty where that is not known."""
    replica: str
    round: int | None
    rank: int | None
    step: int | None
    """The last one that this log had told of before."""
    text: str
    fact: dict[str, JsonValue] | None
    """What the agent says, where it is a line of the agent's."""

    @property
    def seconds(self) -> float:
        """Unix time; 0 where that is not known."""
        return unix_seconds(self.at) if self.at else 0.0

    def line(self) -> str:
        """For a person."""
        who = self.replica if self.rank is None else f"{self.replica} rank {self.rank}"
        return f"{who} | {self.text}"

    def json(self, job: str) -> str:
        """One object, with what is known of where it comes from."""
        where: dict[str, JsonValue] = {
            "at": self.at, "job": job, "replica": self.replica, "round": self.round, "rank": self.rank,
            "step": self.step,
        }  # fmt: skip
        known = {name: value for name, value in where.items() if value is not None}
        return json.dumps({**known, **({"agent": self.fact} if self.fact else {"text": self.text})}, ensure_ascii=False)


@dataclass(frozen=True)
class LogFilter:
    """Which lines are asked for; None: whichever."""

    rank: int | None = None
    round: int | None = None

    def has(self, entry: LogEntry) -> bool:
        return self.rank in (None, entry.rank) and self.round in (None, entry.round)


class LogReader:
    """Of one replica's log, line by line from wherever it is begun."""

    def __init__(self, replica: str, world: World) -> None:
        """`world`: the job's present one; by it is known whose the lines are that come before the agent has said so."""
        self._replica = replica
        self._round: int | None = None
        self._ranks: set[int] = set()
        self._step: int | None = None
        self._since = unix_seconds(world.since) if world.since else 0.0
        self._known = (world.round, world.ranks_of(replica))

    def read(self, at: str, text: str) -> LogEntry:
        """`at`: as in Entry."""
        if self._round is None and self._known[1] and at and unix_seconds(at) >= self._since:
            self._round, self._ranks = self._known[0], set(self._known[1])
        fact = _fact(text)
        if fact is not None:
            return self._of_agent(at, text, fact)
        found = _RANK.match(text)
        rank = int(found[1]) if found else self._only_rank()
        said = log_lines.parse(text)
        if isinstance(said, StepDoneLine):
            self._step = said.step
        return LogEntry(at, self._replica, self._round, rank, self._step, text[found.end() :] if found else text, None)

    def _of_agent(self, at: str, text: str, fact: dict[str, JsonValue]) -> LogEntry:
        round, rank = _count(fact.get("round")), _count(fact.get("rank"))
        if fact["event"] == "worker_started" and round is not None and rank is not None:
            if round != self._round:
                self._round, self._ranks, self._step = round, set(), None
            self._ranks.add(rank)
        rank = self._only_rank() if rank is None else rank
        return LogEntry(at, self._replica, round if round else self._round, rank, self._step, text, fact)

    def _only_rank(self) -> int | None:
        return next(iter(self._ranks)) if len(self._ranks) == 1 else None


def _fact(text: str) -> dict[str, JsonValue] | None:
    if not text.startswith('{"t":') or len(text) > _MOST:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def _count(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def split(line: str) -> tuple[str, str]:
    """The time that a kubelet has put before a line, and the line; an empty time where there is none."""
    at, _, text = line.partition(" ")
    try:
        unix_seconds(at)
    except ValueError:
        return "", line
    return at, text
