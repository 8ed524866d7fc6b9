"""Parser for the log lines of replicas, which determines the round and the rank of each line. Pure.

A round is a period in which a fixed set of replicas trains. When an agent starts a worker, the agent writes a log line
that contains the round and the rank.
"""

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
"""Prefix that the agent adds to each line of a worker's output if a replica has several workers."""
_LONGEST_LINE = 16_384
"""Maximum length in characters of a line by the agent itself. A longer line comes from a worker."""


@dataclass(frozen=True)
class LogEntry:
    """One line of a replica's log, with its time, round and rank.

    A round is a period in which a fixed set of replicas trains.
    """

    at: str
    """Time of the line in RFC 3339. Empty if it is unknown."""
    replica: str
    round: int | None
    rank: int | None
    step: int | None
    """Last step that the replica's log reported in this round, up to and including this line; None if there is none."""
    text: str
    fact: dict[str, JsonValue] | None
    """Fields of the line if the agent itself wrote it (as JSON); None for a line of a worker."""

    @property
    def seconds(self) -> float:
        """Unix time of the line in seconds, or 0 if it is unknown."""
        return unix_seconds(self.at) if self.at else 0.0

    def line(self) -> str:
        """Return the line for printing, with the names of its replica and rank in front."""
        source = self.replica if self.rank is None else f"{self.replica} rank {self.rank}"
        return f"{source} | {self.text}"

    def json(self, job: str) -> str:
        """Return the line as a JSON object with its time, replica, round, rank and step, as far as these are known."""
        where: dict[str, JsonValue] = {
            "at": self.at, "job": job, "replica": self.replica, "round": self.round, "rank": self.rank,
            "step": self.step,
        }  # fmt: skip
        present = {name: value for name, value in where.items() if value is not None}
        return json.dumps(
            {**present, **({"agent": self.fact} if self.fact else {"text": self.text})}, ensure_ascii=False
        )


@dataclass(frozen=True)
class LogFilter:
    """Filter of log lines. A field that is None accepts all lines."""

    rank: int | None = None
    round: int | None = None

    def has(self, entry: LogEntry) -> bool:
        return self.rank in (None, entry.rank) and self.round in (None, entry.round)


class LogReader:
    """Parser of one replica's log, which reads one line at a time and can start at any line."""

    def __init__(self, replica: str, world: World) -> None:
        """Create a reader for one replica's log.

        Args:
            replica: Name of the replica.
            world: Current members of the job. They determine the rank of each line until the first line in which the
                agent names its rank.
        """
        self._replica = replica
        self._round: int | None = None
        self._ranks: set[int] = set()
        self._step: int | None = None
        self._since = unix_seconds(world.since) if world.since else 0.0
        self._present_world = (world.round, world.ranks_of(replica))

    def read(self, at: str, text: str) -> LogEntry:
        """Parse one line of the log.

        Args:
            at: Time of the line in RFC 3339, or empty if unknown.
            text: Text of the line.
        """
        if self._round is None and self._present_world[1] and at and unix_seconds(at) >= self._since:
            self._round, self._ranks = self._present_world[0], set(self._present_world[1])
        fact = _agent_fields(text)
        if fact is not None:
            return self._of_agent(at, text, fact)
        match = _RANK.match(text)
        rank = int(match[1]) if match else self._only_rank()
        message = log_lines.parse(text)
        if isinstance(message, StepDoneLine):
            self._step = message.step
        return LogEntry(at, self._replica, self._round, rank, self._step, text[match.end() :] if match else text, None)

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


def _agent_fields(text: str) -> dict[str, JsonValue] | None:
    if not text.startswith('{"t":') or len(text) > _LONGEST_LINE:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("event"), str) else None


def _count(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def split(line: str) -> tuple[str, str]:
    """Return the timestamp with which the kubelet begins a log line, and the rest of the line.

    The timestamp is empty if the line has none.
    """
    at, _, text = line.partition(" ")
    try:
        unix_seconds(at)
    except ValueError:
        return "", line
    return at, text
