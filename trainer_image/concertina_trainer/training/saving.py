"""When a step is saved, and where it goes: decided from what all ranks agreed on, so the same on every rank."""

from __future__ import annotations

import dataclasses
import time

from concertina_protocol import Durable, History
from concertina_protocol.worker_channel import (
    Committed,
    CopiedUpTo,
    Done,
    DrainRequest,
    Outcome,
    SaveNow,
    WantDurable,
    WorkerEnd,
)
from concertina_trainer.config import CheckpointConfig, TrainerConfig
from concertina_trainer.format.shardfile import Facts
from concertina_trainer.parallel.parallel import World
from concertina_trainer.state.snapshot import Snapshots, Taken
from concertina_trainer.training.agreement import Said
from concertina_trainer.training.anomalies import Anomalies
from concertina_trainer.training.interval import Interval


class Saving:
    """Snapshots to node memory, and which of them become durable."""

    def __init__(
        self,
        config: TrainerConfig,
        checkpoint: CheckpointConfig | None,
        world: World,
        snapshots: Snapshots,
        restored: Facts,
        anomalies: Anomalies,
        durable: Durable | None,
        channel: WorkerEnd,
        history: History,
    ) -> None:
        """`restored`: what this round's snapshots say of themselves, at the step it goes on from. `durable`: the
        newest checkpoint that is known of."""
        self._config, self._checkpoint, self._world = config, checkpoint, world
        self._snapshots, self._facts, self._channel = snapshots, restored, channel
        self._anomalies = anomalies
        self._copied_step = -1
        self._drain: DrainRequest | None = None
        self._due = False
        self._asked = False
        """A person wants a checkpoint."""
        self._durable_step = durable.step if durable else 0
        self._durable_at = durable.at if durable else (0.0 if restored.id.step else time.time())
        self.interval = Interval(checkpoint.every_seconds if checkpoint else None, history)
        self.seconds = 0.0
        """Spent on snapshots in this round."""

    @property
    def snapshot_step(self) -> int:
        """Newest snapshot that is complete on the peers of all ranks."""
        return self._snapshots.step_of(self._snapshots.complete)

    def say(self) -> Said:
        """This rank's flags for the coming all-reduce."""
        for message in self._channel.poll():
            if isinstance(message, CopiedUpTo):
                self._copied_step = max(self._copied_step, message.step)
            elif isinstance(message, DrainRequest):
                self._drain = message
            elif isinstance(message, SaveNow):
                self._asked = self._checkpoint is not None
        last = self._snapshots.count - 1
        return Said(
            drain=int(self._drain is not None),
            drain_durable=int(self._drain is not None and self._drain.durable),
            checkpoint_due=int(self._world.rank == 0 and (self._asked or self._overdue())),
            copied_last=int(self._snapshots.copied(last, self._copied_step)),
            copied_before=int(self._snapshots.copied(last - 1, self._copied_step)),
            shipping=int(self._snapshots.shipping),
        )

    def _overdue(self) -> bool:
        """By the clock, or because a round ended before its checkpoint was in storage."""
        if self._checkpoint is None:
            return False
        seconds, steps = self.interval.seconds, self._checkpoint.every_steps
        by_clock = seconds is not None and time.time() - self._durable_at >= seconds
        return by_clock or (steps is not None and self._facts.id.step // steps > self._durable_step // steps)

    def heard(self, agreed: Said) -> None:
        """Which snapshot is complete on the peers of all ranks. To be told before another is taken: agents then drop
        those of older rounds, whose room the next one may need."""
        last = self._snapshots.count - 1
        if agreed.copied_last == self._world.size:
            self._snapshots.complete = last
        elif agreed.copied_before == self._world.size:
            self._snapshots.complete = max(self._snapshots.complete, last - 1)

    def after(self, step: int, position: int, agreed: Said) -> Done | None:
        """Save what is to be saved after `step` steps; Done when the round ends with it."""
        started = time.perf_counter()
        if agreed.shipping == 0:
            self.interval.shipped()
        complete, drained = step >= self._config.steps, agreed.drain > 0
        if self._checkpoint is not None:
            every = self._checkpoint.every_steps
            self._due |= agreed.checkpoint_due > 0 or (every is not None and step % every == 0)
        durable = self._checkpoint is not None and (
            complete or agreed.drain_durable > 0 or (self._due and agreed.shipping == 0)
        )
        regular = durable or step % self._config.snapshot.every_steps == 0
        if complete or drained or (regular and self._snapshots.keeping_up):
            self._take(step, position, durable, complete, last=complete or drained)
        took = time.perf_counter() - started
        if durable:
            self.interval.saved(took)
        self.seconds += took
        return Done(Outcome.COMPLETE if complete else Outcome.DRAINED, step) if complete or drained else None

    def drained(self, step: int, position: int) -> Done:
        """Stop after `step` steps, while they are evaluated. Should it be durable, the agents ship its snapshot."""
        if self._snapshots.step_of(self._snapshots.count - 1) == step:
            self._snapshots.finish()
        else:
            self._take(step, position, durable=False, complete=False, last=True)
        return Done(Outcome.DRAINED, step)

    def _take(self, step: int, position: int, durable: bool, complete: bool, last: bool) -> None:
        id = dataclasses.replace(self._facts.id, step=step)
        skipped, trend = self._anomalies.skipped, self._anomalies.trend
        facts = dataclasses.replace(self._facts, id=id, position=position, skipped=skipped, trend=trend)
        taken = self._snapshots.begin(facts, self._tell)
        if last or durable:
            self._snapshots.finish()
        if durable:
            link = self._snapshots.link_for_shipping(taken)
            self._channel.send(WantDurable(id, self._world.rank, str(link), complete))
            self._due, self._asked, self._durable_step, self._durable_at = False, False, step, time.time()

    def _tell(self, taken: Taken) -> None:
        self._channel.send(Committed(taken.id, self._world.rank, str(taken.path)))
