"""What a tool that tracks runs has to do. Whatever it raises is told to the user, and the same is tried again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone


class Tracker(Protocol):
    """One run of the tool: the job's, found again by the job's uid, or begun."""

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        """What is logged next comes after `step`. Where the tool can forget what it has of later steps, it does, unless
        another replica is known to coordinate since (not `latest`): it may have logged them meanwhile. The later steps
        that the tool has and keeps: they must not be logged again."""

    def log(self, steps: Sequence[StepDone]) -> None:
        """Each step once, in any order. With the tool when this returns."""

    def annotate(self, name: str, text: str) -> None:
        """A sentence; the same name again replaces it."""

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        """A checkpoint as an artifact of the run, by where it lies. The same again changes nothing. `made_of`: what
        went into it (`lineage`)."""

    def end(self, outcome: RunOutcome) -> None:
        """It is over, or stands still."""

    def close(self) -> None:
        """What is with the tool stays there."""
