"""Decision whether a step's state is saved, and whether the saved state becomes a checkpoint.

The decisions use only values that all ranks agreed on, so all ranks make the same decisions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from concertina_protocol import CheckpointInterval, Durable, SnapshotInterval
from concertina_protocol.messages.ranges import Ranges
from concertina_protocol.worker_channel import (
    Committed,
    CopiedUpTo,
    DrainRequest,
    Message,
    Outcome,
    SaveNow,
    TraceSteps,
    WantDurable,
)
from concertina_state.format.shardfile import Evaluations, LossScale, ShardMetadata, Trend
from concertina_state.interval import Interval
from concertina_state.pace import Pace
from concertina_state.snapshots import Snapshots, TakenSnapshot
from concertina_state.step_trace import Traces


@dataclasses.dataclass(frozen=True)
class StepFlags:
    """Flags of one rank (0 or 1) from which all ranks decide whether to save the state after a step.

    After an all-reduce over the ranks, each field is the number of ranks that have set the flag.
    """

    drain: int = 0
    """Set by rank 0: all ranks are to stop after this step."""
    drain_durable: int = 0
    checkpoint_due: int = 0
    """Set by rank 0: the seconds in `checkpoint.everySeconds` have passed."""
    copied_last: int = 0
    """Set if this rank's shard of the last snapshot is copied to another replica."""
    copied_before: int = 0
    """Set if this rank's shard of the snapshot before the last one is copied to another replica."""
    shipping: int = 0
    """Set if a shard of this rank is still being uploaded to storage."""
    snapshot_due: int = 0
    """Set by rank 0 if enough steps have passed since the last snapshot. If there is no Pace, all ranks set it."""
    snapshot_waits: int = 0
    """Set if a new snapshot would have to wait, for this rank's last snapshot or for the file of the new one."""


@dataclasses.dataclass(frozen=True)
class SaveDecision:
    """Decision about the state after a step: whether to save it, and whether the round continues.

    A round is a period in which a fixed set of replicas trains.
    """

    step: int
    snapshot: bool
    durable: bool
    """True if the snapshot becomes a checkpoint in durable storage."""
    outcome: Outcome | None
    """Outcome of the round, or None if the round continues after this step."""


BEST_SECONDS = 900.0
"""Seconds for which the end of a run waits for the upload of its best checkpoint.

The agents allow a rank more time than this for a save before they report a hang.
"""


@dataclasses.dataclass(frozen=True)
class SavePolicy:
    steps: int
    """Number of the run's last step."""
    snapshot_every: int
    """Number N of steps between snapshots.

    Only after a step whose number is a multiple of N is a regular snapshot taken.
    """
    has_storage: bool
    checkpoint_every: int | None
    """Number of steps between checkpoints, or None if the interval is not set in steps."""

    def is_due(self, step: int, flags: StepFlags) -> bool:
        """Return whether a checkpoint becomes due after this step.

        The checkpoint then remains due until `Saving` begins to make it.
        """
        every = self.checkpoint_every
        return self.has_storage and (flags.checkpoint_due > 0 or (every is not None and step % every == 0))

    def decide(self, step: int, flags: StepFlags, due: bool, keeping_up: bool, required: bool = False) -> SaveDecision:
        """Decide what happens to the state after `step` steps.

        A regular snapshot is left out if some rank would have to wait for the checksum of an earlier snapshot. A
        checkpoint is never left out for that reason, because it waits for its own checksum anyway.

        Args:
            step: Number of finished steps.
            flags: Sums of the flags of all ranks.
            due: True if a checkpoint is due.
            keeping_up: True if other replicas have copied the snapshot that a new snapshot would overwrite.
            required: True to take a snapshot in any case. The value must be the same on all ranks.
        """
        outcome = Outcome.COMPLETE if step >= self.steps else Outcome.DRAINED if flags.drain > 0 else None
        wants_checkpoint = outcome is Outcome.COMPLETE or flags.drain_durable > 0 or (due and flags.shipping == 0)
        durable = self.has_storage and wants_checkpoint
        paced = step % self.snapshot_every == 0 and flags.snapshot_due > 0 and flags.snapshot_waits == 0
        regular = durable or paced
        snapshot = outcome is not None or required or (regular and keeping_up)
        return SaveDecision(step, snapshot, durable and snapshot, outcome)


class AgentChannel(Protocol):
    """Channel between this worker and its agent."""

    def send(self, message: Message) -> None: ...

    def poll(self) -> Sequence[object]:
        """Return the messages from the agent that have arrived."""
        ...


class Saving:
    """Saves of one rank: snapshots in node memory, some of which become checkpoints in durable storage.

    In each step, call these methods in order: `local_flags`, `decide` with the sums of the flags of all ranks, and
    `save` with the decision.
    """

    def __init__(
        self,
        policy: SavePolicy,
        snapshots: Snapshots,
        restored: ShardMetadata,
        durable: Durable | None,
        interval: Interval,
        channel: AgentChannel,
        pace: Pace | None = None,
    ) -> None:
        """Prepare to save the state in one round.

        Args:
            policy: When to save.
            snapshots: Snapshots of this rank.
            restored: Metadata of the state from which the round resumes. New snapshots have the same metadata, except
                for fields that change in each step.
            durable: Newest known checkpoint, or None.
            interval: Interval between checkpoints.
            channel: Channel to the agent.
            pace: Number of steps between two snapshots. If None, the caller decides in which steps to call `decide`.
        """
        self._policy, self._snapshots, self._metadata, self._channel = policy, snapshots, restored, channel
        self._copied_step: int | None = None
        self._drain: DrainRequest | None = None
        self._due = False
        self._asked = False
        """True if a user requested a checkpoint."""
        self._shipping = False
        """True if some rank was still uploading a shard at the last call of `decide`."""
        self._best_step: int | None = None
        """Step of the last checkpoint that was made because it had the lowest evaluation loss, or None."""
        self._durable_step = durable.step if durable else 0
        self._durable_at = (durable.at or 0.0) if durable else (0.0 if restored.id.step else time.time())
        self.traces = Traces(restored.shard)
        self.interval = interval
        self.seconds = 0.0
        """Seconds that training waited for saves in this round."""
        self._pace = pace
        self._began: float | None = None
        """Time of the last call of `save`, or None if that call took a checkpoint.

        After a checkpoint, the time until the next call includes a wait, and is not the duration of a step.
        """
        self._saved = self._waited = False
        """True if the last call of `save` took a snapshot, and whether a snapshot was still being committed at that
        time."""
        self._since = self._stretch = 0
        """Number of steps since the last snapshot, and number of steps between the last two snapshots."""
        self._copying_since: float | None = None
        """Time at which the last snapshot began, or None if the weights have been updated since."""
        self._beside = 0.0
        """Seconds between the beginning of the last snapshot and the weight update.

        A device makes its copy in this time.
        """

    @property
    def snapshot_step(self) -> int | None:
        """Step of the newest snapshot whose shards are all copied to another replica, or None if there is none."""
        return self._snapshots.step_of(self._snapshots.complete)

    @property
    def reported_interval(self) -> CheckpointInterval | None:
        """Interval between checkpoints, for the agent's report, or None if the job has no durable storage."""
        return self.interval.reported if self._policy.has_storage else None

    @property
    def reported_snapshots(self) -> SnapshotInterval | None:
        """Interval between snapshots, for the agent's report, or None before the second snapshot."""
        if self._pace is None or not self._stretch:
            return None
        return SnapshotInterval(self._stretch, self._pace.share(self._stretch))

    def of_layout(self, layout: str, waited_for: bool) -> None:
        """Set the metadata of later snapshots that depend on the saved arrays and on the way in which a script saves.

        Args:
            layout: Digest of the tensors and of how ranks divide them.
            waited_for: Whether the script waits for each snapshot.
        """
        id = dataclasses.replace(self._metadata.id, layout=layout)
        self._metadata = dataclasses.replace(self._metadata, id=id, waited_for=waited_for)

    def evaluated(self, evaluations: Evaluations) -> None:
        """Set the results of the run's evaluations, which later snapshots contain."""
        self._metadata = dataclasses.replace(self._metadata, evaluations=evaluations)

    def amended(self, decision: SaveDecision, complete: bool, best: bool) -> SaveDecision:
        """Return the decision after an evaluation. The arguments must be the same on all ranks.

        Args:
            decision: Decision before the evaluation.
            complete: True to end the run with this step.
            best: True to make a checkpoint of this step because it is the best so far, if the job has durable storage.
        """
        durable = self._policy.has_storage and (best or complete)
        if durable and best:
            self._best_step = decision.step
        return dataclasses.replace(
            decision,
            snapshot=decision.snapshot or complete or durable,
            durable=decision.durable or durable,
            outcome=Outcome.COMPLETE if complete else decision.outcome,
        )

    @property
    def durable_step(self) -> int:
        """Step of the newest checkpoint that this rank knows of. Other ranks may know of a different checkpoint."""
        return self._durable_step

    @property
    def uploading_best(self) -> int | None:
        """Step of the last best checkpoint, if its upload may not have finished. Otherwise None.

        The best checkpoint is the one with the lowest evaluation loss. The upload of a newer checkpoint would end this
        upload. If each best checkpoint ended the upload of the previous one, no best checkpoint would ever be complete.
        """
        return self._best_step if self._shipping and self._best_step == self._durable_step else None

    def local_flags(self, step: int | None = None) -> StepFlags:
        """Return this rank's flags for the next all-reduce.

        `step` is the number of finished steps. Pass it if the ranks do not all-reduce their flags after each step.
        """
        for message in self._channel.poll():
            if isinstance(message, CopiedUpTo):
                self._copied_step = max(self._copied_step or 0, message.step)
            elif isinstance(message, DrainRequest):
                self._drain = message
            elif isinstance(message, SaveNow):
                self._asked = self._policy.has_storage
            elif isinstance(message, TraceSteps):
                self.traces.ask(message)
        last = self._snapshots.count - 1
        return StepFlags(
            drain=int(self._drain is not None),
            drain_durable=int(self._drain is not None and self._drain.durable),
            checkpoint_due=int(self._metadata.shard == 0 and (self._asked or self._overdue(step))),
            copied_last=int(self._snapshots.copied(last, self._copied_step)),
            copied_before=int(self._snapshots.copied(last - 1, self._copied_step)),
            shipping=int(self._snapshots.shipping),
            snapshot_due=int(self._snapshot_is_due()),
            snapshot_waits=int(self._pace is not None and self._snapshots.waits),
        )

    def _snapshot_is_due(self) -> bool:
        if self._pace is None:
            return True
        return self._metadata.shard == 0 and (self._snapshots.count == 0 or self._since + 1 >= self._pace.every)

    def _overdue(self, step: int | None) -> bool:
        """Return whether the next checkpoint is overdue.

        A checkpoint is overdue if enough seconds have passed since the last checkpoint, or if an earlier round ended
        before its own checkpoint was in storage.
        """
        if not self._policy.has_storage:
            return False
        seconds, steps = self.interval.seconds, self._policy.checkpoint_every
        by_clock = seconds is not None and time.time() - self._durable_at >= seconds
        finished_steps = self._metadata.id.step if step is None else step
        return by_clock or (steps is not None and finished_steps // steps > self._durable_step // steps)

    def decide(self, step: int, flags: StepFlags, required: bool = False) -> SaveDecision:
        """Decide what happens to the state after `step` steps, given the sums `flags` of all ranks' flags.

        The sums also show which snapshot is the newest one that other replicas have copied completely. This method
        reports that snapshot to the agents. The agents then delete the snapshots of older rounds, whose memory the next
        snapshot may need.
        """
        last, world = self._snapshots.count - 1, self._metadata.id.shards
        if flags.copied_last == world:
            self._snapshots.complete = last
        elif flags.copied_before == world:
            self._snapshots.complete = max(self._snapshots.complete, last - 1)
        self._shipping = flags.shipping > 0
        if not self._shipping:
            self.interval.shipped()
        self._due |= self._policy.is_due(step, flags)
        return self._policy.decide(step, flags, self._due, self._snapshots.keeping_up, required)

    def save(
        self,
        decision: SaveDecision,
        position: int,
        skipped: Ranges = (),
        trend: Trend = Trend(),  # noqa: B008
        loss_scale: LossScale = LossScale(),  # noqa: B008
    ) -> None:
        """Save the state as `decision` says.

        `position` is the number of samples consumed. `skipped`, `trend` and `loss_scale` are fields of ShardMetadata.
        """
        started = time.perf_counter()
        self._after_step(started, decision)
        if decision.snapshot:
            self._take(decision, position, skipped, trend, loss_scale)
        took = time.perf_counter() - started
        if decision.durable:
            self.interval.saved(took)
        elif decision.snapshot:
            self._after_snapshot(took)
        self.seconds += took
        if decision.outcome is None:
            self._snapshots.make_room()

    def _finish_upload_of_best(self, *, wait: bool) -> None:
        """Let the upload of this rank's shard of the best checkpoint finish, if the upload is in progress.

        The upload of another checkpoint would end this upload. If `wait` is false, for example in a drain, which has
        little time, the best checkpoint is lost.

        In a drain, all ranks stop after the same step.
        """
        if self.uploading_best is None:
            return
        best = f"the best checkpoint, that of step {self._best_step},"
        deadline = time.monotonic() + (BEST_SECONDS if wait else 0.0)
        if wait and self._snapshots.shipping:
            print(f"the last checkpoint waits until {best} is uploaded", flush=True)
        while self._snapshots.shipping and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._snapshots.shipping:
            why = f"took more than {BEST_SECONDS:.0f} s after the last step" if wait else "was not finished by a drain"
            print(f"{best} is not kept: its upload {why}", flush=True)

    def _after_step(self, now: float, decision: SaveDecision) -> None:
        """Report the duration of the last step to the Pace, which limits the cost of snapshots.

        A step that includes a wait for a checkpoint is left out.
        """
        if self._pace is not None and self._began is not None:
            self._pace.stepped(now - self._began, self._saved, self._waited)
        self._began = None if decision.durable else now
        self._saved, self._waited = decision.snapshot, self._snapshots.waits
        self._since += 1
        if decision.snapshot:
            self._stretch, self._since = self._since if self._snapshots.count else 0, 0

    def _after_snapshot(self, stall: float) -> None:
        """Report the cost of a snapshot to the Pace, which limits the cost of snapshots.

        `stall` is the duration of the call of `save`. The cost also includes the time for which the weight update
        waited for a device's copy. This waiting time is known only for the previous snapshot. The first snapshot is not
        counted, because the memory for it has to be allocated.
        """
        if self._pace is not None and self._snapshots.count > 1:
            self._pace.took(stall + max(0.0, self.device_seconds - self._beside))
        self._copying_since = time.perf_counter()

    @property
    def device_seconds(self) -> float:
        """Seconds of a device's time that the newest committed snapshot took (see `Snapshots.device_seconds`)."""
        return self._snapshots.device_seconds

    def before_change(self) -> None:
        """Make devices finish copying the last snapshot before they execute later work that may change the state.

        Only the devices wait. This method returns at once.
        """
        if self._copying_since is not None:
            self._beside, self._copying_since = time.perf_counter() - self._copying_since, None
        self._snapshots.before_change()

    def finish(self) -> None:
        """Wait until the last snapshot is committed."""
        self._snapshots.finish()

    def close(self) -> None:
        """Finish a snapshot that has begun, and take no more snapshots in this round."""
        self._snapshots.close()

    def stop_at(
        self,
        step: int,
        position: int,
        skipped: Ranges,
        trend: Trend,
        loss_scale: LossScale = LossScale(),  # noqa: B008
    ) -> None:
        """Save the state of step `step`, because a request to stop (drain) arrived in the evaluation after that step.

        In a drain, all ranks stop after the same step. If the drain requests a checkpoint, the agents upload this
        snapshot.
        """
        if self._snapshots.step_of(self._snapshots.count - 1) == step:
            self._snapshots.finish()
        else:
            decision = SaveDecision(step, snapshot=True, durable=False, outcome=Outcome.DRAINED)
            self._take(decision, position, skipped, trend, loss_scale)

    def _take(
        self, decision: SaveDecision, position: int, skipped: Ranges, trend: Trend, loss_scale: LossScale
    ) -> None:
        id = dataclasses.replace(self._metadata.id, step=decision.step)
        metadata = dataclasses.replace(
            self._metadata, id=id, position=position, skipped=skipped, trend=trend, loss_scale=loss_scale
        )
        at_once = decision.durable or decision.outcome is not None
        snapshot = self._snapshots.begin(metadata, self._committed, at_once)
        if at_once:
            self._snapshots.finish()
        if decision.durable:
            complete = decision.outcome is Outcome.COMPLETE
            self._finish_upload_of_best(wait=complete)
            link = self._snapshots.link_for_shipping(snapshot)
            self._channel.send(WantDurable(id, self._metadata.shard, str(link), complete))
            self._due, self._asked, self._durable_step, self._durable_at = False, False, id.step, time.time()

    def _committed(self, snapshot: TakenSnapshot) -> None:
        self._channel.send(Committed(snapshot.id, self._metadata.shard, str(snapshot.path)))
