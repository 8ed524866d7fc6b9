"""status.restarts, and other records of failures in the status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from concertina.api.accounting import Count, Name, Seconds, Timestamp
from concertina.api.model import StatusModel
from concertina.api.packed import pack, unpack

LONGEST_MESSAGE = 200


class Restart(StatusModel):
    """One failure that made a new round necessary."""

    at: Timestamp = Field(description="When it was seen.")
    replica: Name = Field(description="The replica that failed first.")
    node: Name = Field(default="", description="Its node.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word.")
    step: Count = Field(default=0, description="Steps finished before it.")
    counted: bool = Field(
        default=True,
        description="Whether the failure counts against failurePolicy.maxRestarts. False if the cause is outside the "
        "job, for example a lost node.",
    )
    action: Annotated[str, Field(max_length=32)] = Field(
        default="", description="Response to it: RestartWorkers, ExcludeReplica, RecreatePod or RestartFromCheckpoint."
    )
    message: Annotated[str, Field(max_length=LONGEST_MESSAGE)] = Field(
        default="", description="Why, as a sentence. Only the newest fifty failures have it."
    )
    error: Annotated[str, Field(max_length=200)] = Field(
        default="",
        description="The message without numbers and addresses. Two failures with the same error count as the same "
        "failure.",
    )
    after_seconds: Seconds = Field(default=0.0, description="Seconds since the round began.")


class LastFailure(StatusModel):
    """The last failure that ended a round, and the last lines that the failed worker printed."""

    at: Timestamp = Field(description="When it was seen.")
    round: Count = Field(description="The round that it ended.")
    replica: Name = Field(default="", description="The replica that failed; empty if no single replica caused it.")
    node: Name = Field(default="", description="Its node.")
    exit_code: int | None = Field(
        default=None, description="Exit code of the worker; a negative one is the signal that killed it."
    )
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=1024)] = Field(description="Why, in a sentence.")
    last_lines: tuple[Annotated[str, Field(max_length=400)], ...] = Field(
        default=(), max_length=20, description="Last lines that the worker printed. The log of its pod has all lines."
    )


class RecoveryActionUse(StatusModel):
    """Number of times that the operator used one recovery action."""

    action: Annotated[str, Field(max_length=32)] = Field(
        description="RestartWorkers, ExcludeReplica, RecreatePod, RestartFromCheckpoint."
    )
    in_window: Count = Field(default=0, description="Failures within the window that were answered with this action.")
    budget: Count | None = Field(
        default=None, description="Failures for which this action can still be used in this window. Absent: no limit."
    )


class AvoidedNode(StatusModel):
    """A node on which this job failed repeatedly."""

    node: Name = Field(description="Its name.")
    until: Timestamp = Field(
        description="New pods avoid the node until this time. The entry stays for one more window."
    )
    reason: Annotated[str, Field(max_length=300)] = Field(default="", description="Why, in a sentence.")
    times: Count = Field(
        default=1,
        description="Number of times that the node was avoided. Each time lasts twice as long as the one before.",
    )


class Restarts(StatusModel):
    """Number of the job's failures, and an entry for each of the last ones."""

    in_window: Count = Field(default=0, description="Failures within failurePolicy.windowSeconds.")
    budget: Count = Field(default=0, description="Failures still allowed in this window.")
    total: Count = Field(default=0, description="Failures since the job was created, including the one that ended it.")
    recovery_actions: tuple[RecoveryActionUse, ...] = Field(
        default=(),
        max_length=8,
        description="Recovery actions that were used within the window, from the least disruptive to the last resort.",
    )
    recent: tuple[Restart, ...] = Field(
        default=(), max_length=1001, description="Failures within the window, at most the newest fifty."
    )


LISTED_RESTARTS = 50
"""Number of entries, the newest ones, that are listed. Older entries are packed."""


def packed_restarts(entries: Sequence[Restart]) -> str:
    return pack([entry.model_dump(mode="json", by_alias=True, exclude_defaults=True) for entry in entries])


def unpacked_restarts(text: str) -> tuple[Restart, ...]:
    """Return the recorded failures of a job from their packed text; empty if the text is invalid."""
    try:
        return tuple(map(Restart.model_validate, unpack(text)))
    except (ValueError, TypeError):
        return ()
