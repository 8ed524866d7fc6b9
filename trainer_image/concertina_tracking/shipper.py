"""What of the spool goes to the tracker, in which order, and what does not: so that the tracker has each step once.

A step is left out where a later round has begun before it (it is trained again, by whoever coordinates that round), and
where the tracker says that it has it (a replayed step, or one that was shipped before this process was killed)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from concertina_protocol.tracking.spool import SpoolReader
from concertina_protocol.tracking.tracking_records import Checkpointed, Noted, Record, RoundBegan, RunEnded, StepDone
from concertina_tracking.tracker import Tracker

MOST_RECORDS = 500
"""Shipped at once."""


class Shipper:
    def __init__(
        self,
        spool: SpoolReader,
        start: Callable[[], Tracker],
        made_of: Callable[[str], Mapping[str, str]],
        environment: str = "",
    ) -> None:
        """`start` or resume the run; nothing is asked of the tool before there is something to tell. `made_of`: see
        `lineage`. `environment`: of this process, in words; told with each round."""
        self._spool, self._start, self._made_of, self._environment = spool, start, made_of, environment
        self._tracker: Tracker | None = None
        self._logged: Collection[int] | None = None
        """Steps that the tracker has, beyond where it went on; None: not known, or not any more."""

    @property
    def idle(self) -> bool:
        """Nothing is left, and another replica tells of what follows."""
        newest = max(self._spool.begun, key=lambda begun: begun.round, default=None)
        return self._spool.behind == 0 and (newest is None or not newest.coordinates)

    def ship(self) -> bool:
        """Some records; whether there may be more. Raises what the tool raises: the same is to be tried again."""
        self._spool.look()
        batch = self._spool.read(MOST_RECORDS)
        try:
            for is_step, group in itertools.groupby(batch, key=lambda numbered: isinstance(numbered[1], StepDone)):
                numbered = list(group)
                if is_step:
                    self._steps([record for _, record in numbered if isinstance(record, StepDone)])
                    self._spool.shipped(numbered[-1][0] + 1)
                    continue
                for number, record in numbered:
                    if record is not None:
                        self._take(number, record)
                    self._spool.shipped(number + 1)
        except BaseException:
            self._logged = None  # who knows what has arrived
            raise
        return bool(batch)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _run(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._start()
        return self._tracker

    def _take(self, number: int, record: Record) -> None:
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

    def _steps(self, steps: Sequence[StepDone]) -> None:
        kept = [step for step in steps if not self._is_void(step)]
        if not kept:
            return
        if self._logged is None:
            first = min(step.step for step in kept)
            self._logged = self._run().go_on(first - 1, latest=self._is_latest(kept[-1].round))
        new = {step.step: step for step in kept if step.step not in self._logged}
        if new:
            self._run().log([_with_world(step, self._spool.begun) for step in new.values()])

    def _is_void(self, step: StepDone) -> bool:
        return any(begun.round > step.round and begun.step < step.step for begun in self._spool.begun)

    def _is_latest(self, round: int) -> bool:
        """No other replica has coordinated a later round: what follows is all in this spool."""
        return all(begun.round <= round or begun.coordinates for begun in self._spool.begun)


def _with_world(step: StepDone, begun: Sequence[RoundBegan]) -> StepDone:
    """With who trained it: which round, and how many workers."""
    workers = [each.workers for each in begun if each.round == step.round and each.coordinates]
    world = {"workers": float(workers[-1])} if workers else {}
    return dataclasses.replace(step, metrics={**step.metrics, **world, "round": float(step.round)})


def _sentence(round: RoundBegan, environment: str) -> str:
    world = f"{round.workers} workers on {round.replicas} replicas"
    source = f", restored from {round.source}" if round.source and round.source != "Fresh" else ""
    return f"{world}, from step {round.step}{source}. {environment}".strip()
