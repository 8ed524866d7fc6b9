"""Selection of the records to send to the tool that tracks the run, so that the tool has each step exactly once.

A step is left out in two cases:
- A later round began before this step. The coordinator of that round trains the step again.
- The tool already has the step, because the step was replayed, or was sent before this process was killed.

The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from concertina_protocol.tracking.spool import SpoolReader
from concertina_protocol.tracking.tracking_records import Checkpointed, Noted, Record, RoundBegan, RunEnded, StepDone
from concertina_tracking.tracker import Tracker

MOST_RECORDS = 500
"""Maximum number of records to send at once."""


class Shipper:
    """Sender of a run's records to a tracking tool, such as MLflow. It reads the records from a folder, the spool."""

    def __init__(
        self,
        spool: SpoolReader,
        start: Callable[[], Tracker],
        made_of: Callable[[str], Mapping[str, str]],
        environment: str = "",
    ) -> None:
        """Prepare to send records. The tool is not contacted yet.

        Args:
            spool: Spool to read the records from.
            start: Function that starts or resumes the run. It is called before the first record is sent.
            made_of: Function that returns the origin of a checkpoint, given the checkpoint's URI (see
                `tracked_lineage`).
            environment: Description of this process's environment, which is sent when a round begins.
        """
        self._spool, self._start, self._made_of, self._environment = spool, start, made_of, environment
        self._tracker: Tracker | None = None
        self._logged: Collection[int] | None = None
        """Steps after the round's start step that the tracking tool already has, or None if they are not known."""

    @property
    def idle(self) -> bool:
        """True if this process may exit.

        This is the case when all its records are sent, and another replica writes the records of later rounds.
        """
        newest = max(self._spool.begun, key=lambda begun: begun.round, default=None)
        return self._spool.behind == 0 and (newest is None or not newest.coordinates)

    def ship(self) -> bool:
        """Send a batch of records to the tool, and return whether there may be more records.

        This method raises the tool's errors. After an error, call it again to send the same records.
        """
        self._spool.look()
        batch = self._spool.read(MOST_RECORDS)
        try:
            for is_step, group in itertools.groupby(batch, key=lambda numbered: isinstance(numbered[1], StepDone)):
                numbered_records = list(group)
                if is_step:
                    self._log_steps([record for _, record in numbered_records if isinstance(record, StepDone)])
                    self._spool.shipped(numbered_records[-1][0] + 1)
                    continue
                for number, record in numbered_records:
                    if record is not None:
                        self._apply(number, record)
                    self._spool.shipped(number + 1)
        except BaseException:
            self._logged = None  # the tool may have received a part of the batch, so what it has is unknown
            raise
        return bool(batch)

    def close(self) -> None:
        """Close the run in the tracking tool, if it was started."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _run(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._start()
        return self._tracker

    def _apply(self, number: int, record: Record) -> None:
        if isinstance(record, RoundBegan):
            if record.coordinates:
                self._logged = self._run().go_on(record.step, latest=self._is_latest(record.round))
                self._run().annotate(f"round.{record.round}", _sentence(record, self._environment))
        elif isinstance(record, Noted):
            at_step = "" if record.step is None or record.step < 0 else f" (step {record.step})"
            self._run().annotate(f"{record.kind}.{record.round}.{number}", f"{record.text}{at_step}")
        elif isinstance(record, Checkpointed):
            self._run().reference(record, self._made_of(record.uri))
        elif isinstance(record, RunEnded) and all(begun.round <= record.round for begun in self._spool.begun):
            self._run().end(record.outcome)

    def _log_steps(self, steps: Sequence[StepDone]) -> None:
        valid_steps = [step for step in steps if not self._is_void(step)]
        if not valid_steps:
            return
        if self._logged is None:
            first = min(step.step for step in valid_steps)
            self._logged = self._run().go_on(first - 1, latest=self._is_latest(valid_steps[-1].round))
        new = {step.step: step for step in valid_steps if step.step not in self._logged}
        if new:
            self._run().log([_with_world(step, self._spool.begun) for step in new.values()])

    def _is_void(self, step: StepDone) -> bool:
        return any(begun.round > step.round and begun.step < step.step for begun in self._spool.begun)

    def _is_latest(self, round: int) -> bool:
        """Return whether this replica has been the coordinator (the agent of rank 0) of all rounds after `round`.

        If so, this replica's spool has the records of all these rounds.
        """
        return all(begun.round <= round or begun.coordinates for begun in self._spool.begun)


def _with_world(step: StepDone, begun: Sequence[RoundBegan]) -> StepDone:
    """Return the step with two more metrics: the round's number, and the number of workers that trained the step."""
    workers = [
        round_began.workers for round_began in begun if round_began.round == step.round and round_began.coordinates
    ]
    world = {"workers": float(workers[-1])} if workers else {}
    return dataclasses.replace(step, metrics={**step.metrics, **world, "round": float(step.round)})


def _sentence(round: RoundBegan, environment: str) -> str:
    world = f"{round.workers} workers on {round.replicas} replicas"
    source = f", restored from {round.source}" if round.source and round.source != "Fresh" else ""
    return f"{world}, from step {round.step}{source}. {environment}".strip()
