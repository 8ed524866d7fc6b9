"""Records of a run for a tracking tool. Each record is one line of JSON.

The coordinator is the agent of rank 0. The coordinator of a round writes a record when an event happens.
`concertina_tracking` sends records to the tool later, and may send a record twice. The module uses the standard library
only and supports Python 3.9 and later.
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
    """Record that a round continues training after `step`. Later steps of older rounds are invalid from then on.

    A round is a period in which a fixed set of replicas trains.
    """

    round: int
    step: int
    at: float
    """Time in Unix seconds at which the round began."""
    coordinates: bool
    """True if this replica coordinates the round, so that it writes the round's records.

    If False, the record only says that this replica will write no more records of earlier rounds.
    """
    source: str = ""
    """Source of the round's state, from RestoreSource, or "" if the script restores its state itself."""
    replicas: int = 0
    workers: int = 0
    """Number of workers, which is the size of the world."""


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
    """Note about an event of the run, such as a failure, for display in the tracking tool."""

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
    """The run was suspended, deleted or failed. It may continue later."""


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
    """Return whether a line may be a RoundBegan record. The line is not parsed, to save time."""
    return line.startswith(b'{"kind":"RoundBegan"')
