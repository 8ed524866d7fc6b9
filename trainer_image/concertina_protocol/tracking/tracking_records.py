"""Records of a run for the tracker, one JSON line each.

The coordinator of a round writes them as events happen. `concertina_tracking` ships them later, and may ship one again.
The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Optional, Union

from concertina_protocol.codec.lines import JsonLines
from concertina_protocol.codec.typed_json import OpenEnum

MOST_TEXT = 500
"""Maximum length of a note in characters."""


@dataclasses.dataclass(frozen=True)
class RoundBegan:
    """Record that training continues after `step`; steps beyond it that older rounds trained are void."""

    round: int
    step: int
    at: float
    """Time at which the round began, in Unix seconds."""
    coordinates: bool
    """Whether this replica writes the round's records. If not, it only notes that its earlier records have ended."""
    source: str = ""
    """A RestoreSource, or empty if the script restores its state itself."""
    replicas: int = 0
    workers: int = 0
    """Number of training processes, which is the size of the world."""


@dataclasses.dataclass(frozen=True)
class StepDone:
    """Record of a finished step."""

    round: int
    step: int
    at: float
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    """Record that a checkpoint is in durable storage."""

    round: int
    step: int
    at: float
    uri: str


class NoteKind(OpenEnum):
    """Kind of a note."""

    FAILURE = "failure"
    NOTICE = "notice"


@dataclasses.dataclass(frozen=True)
class Noted:
    """Record of an event that concerns the run."""

    round: int
    at: float
    kind: NoteKind
    text: str
    """Sentence of at most MOST_TEXT characters."""
    step: Optional[int] = None


class RunOutcome(OpenEnum):
    """Outcome of a run."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """Suspended, deleted or failed. The run may continue later."""


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """Record that the run has ended."""

    round: int
    at: float
    outcome: RunOutcome


Record = Union[RoundBegan, StepDone, Checkpointed, Noted, RunEnded]
KINDS: dict[str, type[Any]] = {
    "RoundBegan": RoundBegan, "StepDone": StepDone, "Checkpointed": Checkpointed, "Noted": Noted, "RunEnded": RunEnded,
}  # fmt: skip
_LINES = JsonLines(KINDS, "the spool of tracking")


def encode(record: Record) -> bytes:
    """Return a record as one line, including the newline."""
    return _LINES.encode(record)


def decode(line: bytes) -> Record:
    """Return the record in one line.

    Raises:
        ProtocolError: If the line is not a valid record.
    """
    return typing.cast(Record, _LINES.decode(line))


def is_round(line: bytes) -> bool:
    """Return whether a line can be a RoundBegan, without parsing it."""
    return line.startswith(b'{"kind":"RoundBegan"')
