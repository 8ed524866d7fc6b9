"""Interface of a tool that tracks runs.

Errors of the tool are reported to the user, and the same records are sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone


class Tracker(Protocol):
    """The job's run in the tool, which is found by the job's uid or created."""

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        """Continue logging after `step`, and return the later steps that the tool keeps.

        A tool that can delete its later steps does so if `latest` is set. If it is not, another replica has coordinated
        since and may have logged them. The returned steps must not be logged again.
        """

    def log(self, steps: Sequence[StepDone]) -> None:
        """Log each step once, in any order. The tool has the steps when this returns."""

    def annotate(self, name: str, text: str) -> None:
        """Add a sentence to the run, or replace the one with the same name."""

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        """Add a checkpoint to the run as an artifact that refers to its location.

        The same call again changes nothing.

        Args:
            checkpoint: Checkpoint in durable storage.
            made_of: Origin of the checkpoint (see `tracked_lineage`).
        """

    def end(self, outcome: RunOutcome) -> None:
        """Record that the run has ended or is stopped."""

    def close(self) -> None:
        """Close the connection to the tool. Data that the tool has stay there."""
