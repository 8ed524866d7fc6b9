"""Interface to a tool that tracks runs.

A method may raise any error. The caller reports the error to the user, and sends the same records again later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone


class Tracker(Protocol):
    """Run in a tracking tool. The run is found by the job's uid, or created if the tool has none for this job."""

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        """Prepare to log the steps after `step`, and return the steps among them that the tool already has.

        The caller does not log the returned steps again. `latest` is whether this replica has been the coordinator
        (which logs the steps) in all rounds since `step`. If it has, a tool that can delete steps deletes all steps
        after `step`. Otherwise, another replica may have logged some of these steps, and the tool keeps them.

        The coordinator is the agent of rank 0.
        """

    def log(self, steps: Sequence[StepDone]) -> None:
        """Log each step once, in any order. When the method returns, the tool has the steps."""

    def annotate(self, name: str, text: str) -> None:
        """Add a sentence to the run under a name, in place of an earlier sentence with the same name."""

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        """Add a checkpoint to the run, as an artifact that refers to the checkpoint's location.

        A second call with the same checkpoint changes nothing.

        Args:
            checkpoint: Checkpoint in durable storage.
            made_of: Origin of the checkpoint (see `tracked_lineage`).
        """

    def end(self, outcome: RunOutcome) -> None:
        """Record the outcome of the run: it succeeded, or it was stopped and may continue later."""

    def close(self) -> None:
        """Close the connection to the tool. The tool keeps the data that were sent."""
