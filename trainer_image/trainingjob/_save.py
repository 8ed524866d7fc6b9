"""Commits of a `State`: the contents of this rank's shard, and the snapshots of the shard.

The code that saves is shared with the bundled trainer (`concertina_state.saving`). A script only reports that a step is
finished. Its ranks communicate only at steps that are saved, and rank 0 decides the number of steps between two saves.

A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from concertina_protocol import SnapshotId
from concertina_protocol.stderr import write_line
from concertina_protocol.worker_channel import Done, Outcome
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import ShardMetadata
from concertina_state.interval import Interval
from concertina_state.lineage import TrainedRound, of_round, script_digest
from concertina_state.pace import Pace
from concertina_state.saving import SavePolicy, Saving
from concertina_state.snapshots import Snapshots
from trainingjob import _values
from trainingjob._channel import RoundEnded
from trainingjob._contents import Contents
from trainingjob._ranks import StateIndex
from trainingjob._refusals import faults_reported
from trainingjob._session import Agreement, Session, StartPoint, agree

SUSPICIOUS_COMMITS = 10
"""Commits without a step of the `State`'s own optimizers, while another optimizer steps, before an error is raised."""
PATIENT_COMMITS = 100
"""Number of commits without a possible snapshot after which a warning is logged."""
ENDLESS = 2**62
"""Number of steps that is assumed for a run, because only the script knows when the run ends."""
GROWTH = 1.5
"""Factor by which the space for values exceeds their size, so that a shard's file keeps its size when they grow."""


class OwnShard:
    """Contents of this rank's shard file: an index of the live arrays, this rank's values, and the snapshots.

    A snapshot is a copy of the training state in node memory.
    """

    def __init__(self, session: Session, contents: Contents) -> None:
        self._session, self._contents = session, contents
        self.buffers_by_rank = False
        """True if each rank saves its own buffers, because they differ between ranks."""
        self.index: StateIndex | None = None
        self.snapshots: Snapshots | None = None
        self._shared_buffers: Mapping[str, Any] = {}
        """Buffers that rank 0 saves for all ranks."""
        self._values_text = bytearray(1)
        """This rank's values as text, in the form in which the shard contains them."""
        self._values_array = session.ranks.memory(self._values_text)
        self._snapshot_count, self._next_check = 0, 1
        """Number of snapshots so far, and the snapshot number at which ranks next compare their replicated arrays."""

    def current(self) -> tuple[StateIndex, Snapshots]:
        """Return the index of the script's objects in their present state, and the snapshots.

        At some snapshots, the ranks also compare the arrays that must be the same on all ranks. After each comparison,
        the number of snapshots until the next one doubles.

        Raises:
            InvalidInput: Arrays can't be saved, or differ between ranks.
        """
        arrays, values = self._contents.current()
        index, snapshots = self.update(arrays, self._contents.buffers(), values)
        self._snapshot_count += 1
        if self._snapshot_count >= self._next_check:
            self._next_check *= 2
            self._contents.check_replicated()
        return index, snapshots

    def update(
        self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[StateIndex, Snapshots]:
        """Return the index of the given arrays, and the snapshots.

        A new index is made only if the arrays are new objects.
        """
        text = _values.encode(values, "state")
        if len(text) > len(self._values_text):
            self._values_text = bytearray(int(len(text) * GROWTH) + 4096)
            self._values_array = self._session.ranks.memory(self._values_text)
        self._shared_buffers = {} if self.buffers_by_rank else buffers
        index = self.index
        if index is None or not index.still({**arrays, **self._shared_buffers, **self._own_arrays(buffers)}):
            index = self.new_index(arrays, buffers)
            if self.snapshots is not None:
                self.snapshots.of_arrays(index.saved)
        if self.snapshots is None:
            folder = self._session.agent.snapshots / f"shard-{self._session.world.rank}"
            self.snapshots = Snapshots(folder, index.saved)
        self._values_text[:] = text.ljust(len(self._values_text))
        return index, self.snapshots

    def close(self) -> None:
        """Finish the snapshot that has begun, and take no more snapshots."""
        if self.snapshots is not None:
            self.snapshots.close()

    def new_index(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any]) -> StateIndex:
        """Create the index of these arrays, and return it."""
        shared_buffers = {} if self.buffers_by_rank else buffers
        self.index = self._session.ranks.index(arrays, shared_buffers, self._own_arrays(buffers))
        return self.index

    def _own_arrays(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays that only this rank has, keyed by names that no other rank uses."""
        rank = self._session.rank_name
        own_buffers = {f"{rank}.{name}": buffer for name, buffer in buffers.items()} if self.buffers_by_rank else {}
        return {rank: self._values_array, **own_buffers}

    def buffers_digest(self) -> int:
        """Return a checksum of the buffers. Ranks with the same checksum have the same buffers."""
        return self._session.ranks.digest(self._shared_buffers) if self._session.world.size > 1 else 0


class Saver:
    """Writer of the snapshots of a `State`, which limits the share of the training time that snapshots take.

    A snapshot is a copy of the training state in node memory.
    """

    def __init__(self, session: Session, contents: Contents, shard: OwnShard, overhead: float) -> None:
        """Prepare to save snapshots when the script commits steps.

        Args:
            session: World, agent and settings of this process.
            contents: Objects to save.
            shard: Contents of this rank's shard file.
            overhead: Share of the training time that snapshots may take.
        """
        self._session, self._contents, self._shard = session, contents, shard
        self.start_point = StartPoint()
        self.saving: Saving | None = None
        """Writer of this round's snapshots, or None before the first save."""
        self._pace = Pace(overhead)
        self._commits, self._next_save = 0, 1
        self._commit_began: float | None = None
        """Time at which the last commit began, or None."""
        self._saved = False
        """True if the last commit took a snapshot."""
        self._durable_due = False
        """True if a durable commit waits for a save point."""
        self._commits_overdue = 0
        """Commits since a snapshot was due."""

    def commit(self, step: int, durable: bool) -> None:
        """Take a snapshot after the finished step `step`, if a snapshot is due. See `State.commit`.

        Raises:
            RoundEnded: The workers are about to be stopped, and the state has been saved.
        """
        agent, save_points = self._session.agent, self._contents.save_points
        began, finished = time.perf_counter(), int(step) + 1
        if self._commit_began is not None:
            self._pace.stepped(began - self._commit_began, self._saved)
        self._commit_began = began
        self._commits += 1
        must_stop = agent.must_stop()
        at_save_point = save_points is None or save_points.pass_commit()
        self._durable_due |= durable
        due = must_stop or self._durable_due or self._commits >= self._next_save
        self._saved = due and at_save_point and self._save(finished, self._durable_due, must_stop)
        if due and not self._saved:
            self._note_overdue(finished, durable)
        saving = self.saving
        agent.report_commit(finished, saving.snapshot_step if saving else None, saving.seconds if saving else 0.0)
        if must_stop and self._saved:
            agent.send(Done(Outcome.DRAINED, finished))
            raise RoundEnded(0)

    def _note_overdue(self, finished: int, durable: bool) -> None:
        """Count a commit at which no state could be saved, and warn the user if this happens repeatedly.

        Raises:
            InvalidInput: The only optimizer that makes steps is not part of the `State`.
        """
        self._commits_overdue += 1
        save_points = self._contents.save_points
        if self._commits_overdue >= SUSPICIOUS_COMMITS and save_points is not None and save_points.only_others_step:
            with faults_reported():
                raise InvalidInput(
                    f"in {self._commits_overdue} commits, no optimizer in State has made a step, but "
                    "another optimizer has. Its moments would be lost: give State the optimizer that makes "
                    "the steps."
                )
        if durable:
            text = (
                f"step {finished} is in the middle of gradient accumulation, so the next optimizer step is "
                "made durable instead"
            )
            advice = "Call commit(durable=True) right after optimizer.step()"
        elif self._commits_overdue == PATIENT_COMMITS:
            text = (
                f"nothing was saved in the last {PATIENT_COMMITS} commits, because no optimizer has made "
                "a step since gradients were computed"
            )
            advice = "Call commit() right after optimizer.step(), and give State the optimizers that make the steps"
        else:
            return
        write_line(f"trainingjob: {text}. {advice}.")

    def _save(self, finished: int, durable: bool, must_stop: bool) -> bool:
        """Take a snapshot and return True, or return False if gradients on a rank still wait for an optimizer step."""
        started = time.perf_counter()
        save_points = self._contents.save_points
        pending = save_points is not None and save_points.has_pending_gradients()
        with faults_reported():
            index, snapshots = self._shard.current()
            saving = self._saving_of(snapshots)
            digest = self._shard.buffers_digest()
        prepared = time.perf_counter()
        flags = dataclasses.replace(saving.local_flags(finished), drain=int(must_stop))
        if durable:
            flags = dataclasses.replace(flags, checkpoint_due=1)
        agreement = agree(self._session, flags, index, self._pace.every, digest, pending)
        if not agreement.buffers_alike:
            self._shard.buffers_by_rank = True
            with faults_reported():
                index, _ = self._shard.current()
            agreement = agree(self._session, flags, index, self._pace.every, pending=pending)
        agreed = time.perf_counter()  # until then, the rank waits for others, as it does in each step
        if agreement.pending:
            return False
        self._take(saving, agreement, finished, durable)
        self._durable_due, self._commits_overdue = False, 0
        self._next_save = self._commits + agreement.every
        if self._commits > 1:  # the first snapshot allocates memory
            copy_seconds = max(time.perf_counter() - agreed, saving.device_seconds)
            self._pace.took(prepared - started + copy_seconds)
        return True

    def _take(self, saving: Saving, agreement: Agreement, finished: int, durable: bool) -> None:
        saving.of_layout(agreement.layout, waited_for=durable)
        position = self._contents.samples if self._contents.sample_counters else finished
        saving.save(saving.decide(finished, agreement.flags, required=durable), position)
        # A script may change anything next, not only what its optimizer steps (decision "A script's snapshot is copied
        # before commit returns").
        saving.before_change()
        if durable:
            saving.finish()  # the script may end at once

    def save_again(self, saved: ShardMetadata, layout: str) -> None:
        """Save the restored state as a snapshot of this round, in case the script commits no further step.

        Agents upload only snapshots that were committed in the present round. A script that had finished when the
        previous round ended makes no further commit, so its last state would not be uploaded (decision "Durable
        snapshots are uploaded again").
        """
        arrays, values = self._contents.current()
        _, snapshots = self._shard.update(arrays, self._contents.buffers(), values)
        saving = self._new_saving(snapshots)
        saving.of_layout(layout, waited_for=True)
        saving.stop_at(saved.id.step, saved.position, saved.skipped, saved.trend)

    def _saving_of(self, snapshots: Snapshots) -> Saving:
        if self.saving is None:
            self.saving = self._new_saving(snapshots)
        return self.saving

    def _new_saving(self, snapshots: Snapshots) -> Saving:
        """Return an object that saves this round's snapshots, each with the list of all earlier rounds."""
        agent, checkpoint, world, start = (
            self._session.agent, self._session.checkpoint, self._session.world, self.start_point,
        )  # fmt: skip
        id = SnapshotId(agent.round, start.step, "", world.size)
        data_sets = [counter.digest for counter in self._contents.sample_counters]
        trained = TrainedRound(agent.round, start.step, start.position, world.size)
        origin = of_round(start.origin, trained, "", data_sets, agent.images, script_digest())
        data = data_sets[0] if len(data_sets) == 1 else ""
        metadata = ShardMetadata(id, world.rank, start.step, "", data, start.continued, origin=origin)
        policy = SavePolicy(ENDLESS, 1, bool(checkpoint), checkpoint.get("everySteps"))
        interval = Interval(checkpoint.get("everySeconds", 600) if checkpoint else None, agent.history)
        return Saving(policy, snapshots, metadata, agent.durable, interval, agent)
