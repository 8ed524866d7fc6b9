"""What is tracked of a run, a JSON line each. Standard library only, Python 3.9+.

The coordinator of a round writes them as they happen; `concertina_tracking` ships them, later or again."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Optional, Union

from concertina_protocol.codec.lines import JsonLines
from concertina_protocol.codec.typed_json import OpenEnum

MOST_TEXT = 500
"""Characters of a note."""


@dataclasses.dataclass(frozen=True)
class RoundBegan:
    """Training goes on after `step`: what older rounds have trained beyond it is void."""

    round: int
    step: int
    at: float
    """Unix seconds."""
    coordinates: bool
    """Whether this replica tells of the round; else it only knows that what it has told is over."""
    source: str = ""
    """A RestoreSource; empty where the script restores by itself."""
    replicas: int = 0
    workers: int = 0
    """Training processes: the world's size."""


@dataclasses.dataclass(frozen=True)
class StepDone:
    round: int
    step: int
    at: float
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    """A checkpoint is in durable storage."""

    round: int
    step: int
    at: float
    uri: str


class NoteKind(OpenEnum):
    FAILURE = "failure"
    NOTICE = "notice"


@dataclasses.dataclass(frozen=True)
class Noted:
    """Something has happened to the run."""

    round: int
    at: float
    kind: NoteKind
    text: str
    """A sentence of at most MOST_TEXT characters."""
    step: Optional[int] = None


class RunOutcome(OpenEnum):
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """Suspended, deleted or failed; it may go on."""


@dataclasses.dataclass(frozen=True)
class RunEnded:
    round: int
    at: float
    outcome: RunOutcome


Record = Union[RoundBegan, StepDone, Checkpointed, Noted, RunEnded]
KINDS: dict[str, type[Any]] = {
    "RoundBegan": RoundBegan, "StepDone": StepDone, "Checkpointed": Checkpointed, "Noted": Noted, "RunEnded": RunEnded,
}  # fmt: skip
_LINES = JsonLines(KINDS, "the spool of tracking")


def encode(record: Record) -> bytes:
    """One line, newline included."""
    return _LINES.encode(record)


def decode(line: bytes) -> Record:
    """Raises ProtocolError."""
    return typing.cast(Record, _LINES.decode(line))


def is_round(line: bytes) -> bool:
    """Whether it can be a RoundBegan, told without reading the whole of it."""
    return line.startswith(b'{"kind":"RoundBegan"')
