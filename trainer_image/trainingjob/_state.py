"""`trainingjob.State`: a script's state in node memory, on peers and in durable storage.

Saving is the bundled trainer's (`concertina_state.saving`); what differs is that a script says only when a step is
finished. So ranks agree not in each step but in those that are saved, and how far apart these are is told by rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trainingjob
from concertina_protocol import Durable, RestoreSource, SnapshotId
from concertina_protocol.worker_channel import Done, KeepsState, Outcome, Start
from concertina_state.errors import BadInput
from concertina_state.format.shardfile import Continued, ShardMetadata
from concertina_state.interval import Interval
from concertina_state.lineage import Origin, TrainedRound, of_round, script_digest
from concertina_state.saved import InMemory, SavedState, find
from concertina_state.saving import SavePolicy, Saving, StepFlags
from concertina_state.snapshots import Snapshots
from trainingjob import _objects, _storage, _values
from trainingjob._channel import Channel
from trainingjob._counted import Counted
from trainingjob._folder import Folder
from trainingjob._pace import Pace
from trainingjob._ranks import Catalogue, Gather, ranks
from trainingjob._refusals import INSTEAD, told

ENDLESS = 2**62
"""Steps of a run whose end only the script knows."""
ROOM = 1.5
"""For values to grow in, so that a shard's file keeps its size: times what they take at first."""


STORAGE_SECONDS, STORAGE_PAUSE = 300.0, 5.0
"""How long storage that can't be read is waited for, and between tries where it refuses: a start that fails counts
against the job's restarts."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all ranks know of each other after a collective."""

    flags: StepFlags
    every: int
    """Commits until the next snapshot, as rank 0 says."""
    layout: str
    """Digest of what all ranks hold."""


class State:
    def __init__(
        self, *, folder: str = "checkpoints", overhead: float = 0.01, gather: Gather | None = None, **objects: Any
    ) -> None:
        """`folder`: where there is no job. `overhead`: part of the time that snapshots may take. `gather`: how several
        processes agree where that is not torch.distributed: it takes a rank's bytes and returns those of all, in their
        order. Raises TypeError for what has no state, BadInput where ranks can't agree."""
        self._world = trainingjob.world()
        with told():
            self._ranks = ranks(self._world, gather)
        self._kept: dict[str, _objects.Kept] = {}
        self.add(**objects)
        self._checkpoint: Mapping[str, Any] = json.loads(os.environ.get("CONCERTINA_CHECKPOINT") or "null") or {}
        channel = trainingjob.connection()
        self._end: Channel | Folder = channel or Folder(Path(folder), self._world, self._ranks.same)
        self._end.send(KeepsState(self._world.rank))
        self._data = [each for each in objects.values() if isinstance(each, Counted)]
        self._end.counts(self._samples)
        self._pace = Pace(overhead)
        self._commits, self._next = 0, 1
        self._began: float | None = None
        """When the last commit did."""
        self._saved = False
        """Whether it has taken a snapshot."""
        self._catalogue: Catalogue | None = None
        self._own = bytearray()
        """This rank's values, as they stand in its shard."""
        self._snapshots: Snapshots | None = None
        self._saving: Saving | None = None
        self._restored = 0
        self._continued: Continued | None = None
        self._begun_from = ""
        """Another job's checkpoint, where this round begins with it."""
        self._origin = Origin()
        self._position = 0
        """Of what was restored: what has led to it, and samples consumed."""
        self._found: SavedState | None = None
        self._reading = contextlib.ExitStack()
        """Open while a checkpoint in storage is read: as rank 0 says, it stays so long."""

    def add(self, **objects: Any) -> None:
        """More objects, before `restore`: those that a framework makes once it knows where it goes on. An optimizer
        comes with the modules that it trains."""
        if "random" in objects:
            raise TypeError("random is what random numbers are called: give this object another name")
        self._kept = {**self._kept, **_objects.kept(objects, self._ranks.with_torch)}
        self._kept.pop("random", None)
        # Put back last, as putting back others may draw.
        self._kept["random"] = _objects.KeptStateful(_objects.RandomNumbers())

    # --- back -------------------------------------------------------------------------------------------------------

    def peek(self, name: str) -> Any:
        """What `state_dict()` of one object gave in the newest saved state, for this rank, before that object is there;
        None where nothing was saved. `restore` takes the same state then."""
        with told(), contextlib.ExitStack() as failed:
            failed.enter_context(self._reading)
            self._found = self._newest()
            found = None if self._found is None else self._values_of(self._found).get(name)
            failed.pop_all()  # it is read on by `restore`
            return found

    def restore(self, default: int = 0) -> int:
        """Fill all objects with the newest saved state, of whatever world; returns the step to go on with, or `default`
        where nothing was saved. Raises BadInput where it is of other objects."""
        with told(), self._reading:
            saved, self._found = self._found or self._newest(), None
            if saved is None:
                self._end.restored(default, RestoreSource.FRESH)
                return default
            values = self._values_of(saved)
            if lacking := [name for name in self._kept if name not in values]:
                raise BadInput(f"the saved state of step {saved.id.step} has no {', '.join(lacking)}: {INSTEAD}.")
            for name, each in self._kept.items():
                each.prepare(values[name])
            catalogue = self._catalogue = self._new_catalogue()
            layout = self._agree(StepFlags(), catalogue).layout
            same = (saved.id.layout, saved.id.shards) == (layout, self._world.size)
            alone = self._world.rank if same and catalogue.alone else None
            found = find(saved, alone, lambda held: catalogue.plan(held, INSTEAD))
            catalogue.fill(found.plan, found.shards)
            source = RestoreSource.MEMORY if isinstance(saved, InMemory) else RestoreSource.STORAGE
            if source is RestoreSource.STORAGE:
                self._ranks.sums([0.0])  # all have read it
            self._goes_on_from(found.metadata)
            for name, each in self._kept.items():
                each.load(values[name])
        if self._world.rank >= saved.id.shards:
            _objects.RandomNumbers().draw_others(self._world.rank)
        self._restored = saved.id.step
        self._end.restored(saved.id.step, source)
        with told():
            self._cataloged(
                self._arrays(), values
            )  # room for the first snapshot is made while the script computes its step
            if source is RestoreSource.MEMORY and self._checkpoint and found.metadata.waited_for:
                self._save_again(found.metadata, layout)
        return saved.id.step

    def _save_again(self, saved: ShardMetadata, layout: str) -> None:
        """In this round: a script that was through with it commits nothing more, and a round's agents bring to storage
        what was committed in it (decision "What may be a script's last step is saved again")."""
        _, snapshots = self._cataloged(*self._now())
        saving = self._new_saving(snapshots)
        saving.of_layout(layout, waited_for=True)
        saving.stop_at(saved.id.step, saved.position, saved.skipped, saved.trend)

    def _goes_on_from(self, saved: ShardMetadata) -> None:
        self._position, self._origin = saved.position, saved.origin
        if self._begun_from:
            self._origin = saved.origin.begun_with(self._begun_from)
        else:
            self._continued = saved.continued

    def _newest(self) -> SavedState | None:
        if isinstance(self._end, Folder):
            return self._end.newest()
        start = self._end.start()
        uri = self._checkpoint.get("uri")
        durable = self._ranks.same(self._durable(start)) if uri else None
        if durable is not None:
            _storage.find_client()
            from concertina_state.checkpoints.reader import StoredCheckpoint

            stored = StoredCheckpoint(durable.uri)
            if durable.uid != start.uid:
                self._continued = Continued(durable.uid, durable.round, durable.step)
                self._begun_from = stored.uri
            return stored
        if start.restore.source == RestoreSource.MEMORY and start.restore.id is not None:
            return InMemory(start.restore.id, self._end)
        return None

    def _durable(self, start: Start) -> Durable | None:
        """The checkpoint to go on from, where none in memory is as new; on rank 0."""
        if self._world.rank != 0:
            return None
        held = start.restore.id if start.restore.source == RestoreSource.MEMORY else None
        known = _newer(start, held) if held is not None else None
        if held is not None and known is None:
            return None  # agents say what LATEST is: storage itself is not asked, so it may be away
        _storage.find_client()
        from concertina_state.checkpoints.reader import opened
        from concertina_state.objects.prefix import StorageError, StoreRefused

        if known is not None:
            self._reading.enter_context(opened(known.uri))
            return known
        until = time.monotonic() + STORAGE_SECONDS
        while True:
            try:
                return _newest_in(self._checkpoint, self._reading)
            except StorageError as error:
                if time.monotonic() > until:
                    raise
                print(f"trainingjob: durable storage can't be read, tried again: {error}", file=sys.stderr, flush=True)
                time.sleep(STORAGE_PAUSE if isinstance(error, StoreRefused) else 1.0)

    def _values_of(self, saved: SavedState) -> Any:
        """Of the rank of the same number; where there are more now, they begin with those of another."""
        shard = saved.open(self._world.rank % saved.id.shards)
        name = _name(self._world.rank % saved.id.shards)
        stored = shard.header.chunks.get(name)
        if stored is None:
            raise BadInput(f"the saved state of step {saved.id.step} was not saved by trainingjob.State")
        data = bytearray(stored.chunk.size)
        shard.read_into([(stored.begin, memoryview(data))])
        return _values.decode(bytes(data))

    # --- forth ------------------------------------------------------------------------------------------------------

    def commit(self, step: int, durable: bool = False) -> None:
        """Step `step`, counted from 0, is finished. On all ranks, after every step. When this world is about to end, it
        saves and ends the process (SystemExit).

        `durable`: wait until this one is whole in node memory, and let it be a checkpoint in storage (or the next one,
        where another is still on its way there). The same on all ranks; true for the script's last step."""
        began, done = time.perf_counter(), int(step) + 1
        if self._began is not None:
            self._pace.stepped(began - self._began, self._saved)
        self._began = began
        self._commits += 1
        ends = self._end.passes()
        self._saved = ends or durable or self._commits >= self._next
        if self._saved:
            self._save(done, durable, ends)
        saving = self._saving
        assert saving is not None  # the first commit always saves
        self._end.finished(done, saving.snapshot_step, saving.seconds)
        if ends:
            self._end.send(Done(Outcome.DRAINED, done))
            raise SystemExit(0)

    def _save(self, done: int, durable: bool, ends: bool) -> None:
        started = time.perf_counter()
        with told():
            catalogue, saving = self._current()
        ready = time.perf_counter()
        flags = dataclasses.replace(saving.local_flags(done), drain=int(ends))
        if durable:
            flags = dataclasses.replace(flags, checkpoint_due=1)
        agreed = self._agree(flags, catalogue)
        together = time.perf_counter()  # others are waited for until then, as they are in each step
        saving.of_layout(agreed.layout, waited_for=durable)
        saving.save(saving.decide(done, agreed.flags, required=durable), self._samples() if self._data else done)
        saving.before_change()  # a script may change anything next
        if durable:
            saving.finish()  # the script may end at once
        self._next = self._commits + agreed.every
        if self._commits > 1:  # the first one finds memory
            copying = max(time.perf_counter() - together, saving.device_seconds)
            self._pace.took(ready - started + copying)

    def _current(self) -> tuple[Catalogue, Saving]:
        """With what there is now."""
        catalogue, snapshots = self._cataloged(*self._now())
        if self._saving is None:
            self._check_alike()
            self._saving = self._new_saving(snapshots)
        return catalogue, self._saving

    def _now(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays, and this rank's values beside them."""
        arrays: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, each in self._kept.items():
            found, values[name] = each.now()
            arrays |= self._of_library(name, found)
        return arrays, values

    def _cataloged(self, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Catalogue, Snapshots]:
        """Of these."""
        text = _values.encode(values, "state")
        if self._catalogue is None or len(text) > len(self._own) or not self._catalogue.still(arrays):
            if len(text) > len(self._own):
                self._own = bytearray(int(len(text) * ROOM) + 4096)
            self._catalogue = self._new_catalogue(arrays)
            if self._snapshots is None:
                self._snapshots = Snapshots(self._end.snapshots / f"shard-{self._world.rank}", self._catalogue.saved)
            else:
                self._snapshots.of_arrays(self._catalogue.saved)
        self._own[:] = text.ljust(len(self._own))
        assert self._snapshots is not None
        return self._catalogue, self._snapshots

    def _arrays(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, each in self._kept.items():
            found |= self._of_library(name, each.arrays())
        return found

    def _of_library(self, name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """As what is of this object is saved, by full names."""
        named = {f"{name}.{key}": array for key, array in arrays.items()}
        return {path: self._ranks.array(array, path) for path, array in named.items()}

    def _new_catalogue(self, arrays: Mapping[str, Any] | None = None) -> Catalogue:
        own = {_name(self._world.rank): self._own} if self._own else {}
        return self._ranks.catalogue(self._arrays() if arrays is None else arrays, own)

    def _new_saving(self, snapshots: Snapshots) -> Saving:
        end, checkpoint = self._end, self._checkpoint
        id = SnapshotId(end.round, self._restored, "", self._world.size)
        data = self._data[0].digest if len(self._data) == 1 else ""
        trained = TrainedRound(end.round, self._restored, self._position, self._world.size)
        sets = [each.digest for each in self._data]
        origin = of_round(self._origin, trained, "", sets, end.images, script_digest())
        metadata = ShardMetadata(id, self._world.rank, self._restored, "", data, self._continued, origin=origin)
        policy = SavePolicy(ENDLESS, 1, bool(checkpoint), checkpoint.get("everySteps"))
        interval = Interval(checkpoint.get("everySeconds", 600) if checkpoint else None, end.history)
        return Saving(policy, snapshots, metadata, end.durable, interval, end)

    def _samples(self) -> int:
        """Consumed of the data that it keeps."""
        return sum(each.samples for each in self._data)

    # --- together ---------------------------------------------------------------------------------------------------

    def _agree(self, flags: StepFlags, catalogue: Catalogue) -> Agreed:
        """The one collective of a save: sums of a few numbers."""
        mine = int(catalogue.digest[:8], 16)
        every = self._pace.every if self._world.rank == 0 else 0
        numbers = [float(each) for each in (*dataclasses.astuple(flags), every, mine)]
        numbers = self._ranks.sums(numbers)
        *counts, every, layout = (round(number) for number in numbers)
        return Agreed(StepFlags(*counts), every, f"{layout:x}")

    def _check_alike(self) -> None:
        """Whole arrays are saved by one rank for all: it is an error where they are not the same on all."""
        whole: dict[str, Any] = {}
        for name, each in self._kept.items():
            whole |= self._of_library(name, each.alike())
        differs = self._ranks.differing(whole)
        if differs:
            raise BadInput(
                f"{differs[0]} is not the same on all ranks, and no DTensor that says how it is cut: make it "
                "one (torch.distributed.tensor), or let DistributedDataParallel keep it the same; of an array in a "
                f"dict, say which part it is (trainingjob.Part). ({len(differs)} of {len(whole)} differ.)"
            )


def _newer(start: Start, held: SnapshotId) -> Durable | None:
    """What LATEST names, where that is of this job, and newer than what memory holds."""
    known = start.durable
    newer = known is not None and known.uid == start.uid and (known.round, known.step) > (held.round, held.step)
    return known if newer else None


def _newest_in(checkpoint: Mapping[str, Any], reading: contextlib.ExitStack) -> Durable | None:
    """In the job's own folder, or what it is to be begun with, which stays while `reading` is open. Raises
    StorageError, or BadInput."""
    from concertina_state.checkpoints.latest import read_latest
    from concertina_state.checkpoints.reader import opened, resolve
    from concertina_state.objects.prefix import ObjectPrefix

    found = read_latest(ObjectPrefix(checkpoint["uri"], create=True))
    another = checkpoint.get("resumeFrom")
    folder = found.uri if found else resolve(another) if another else ""
    if not folder:
        return None
    place = reading.enter_context(opened(folder)).manifest.place
    return found or Durable(place.uid, place.round, place.step, folder)


def _name(rank: int) -> str:
    return f"rank-{rank}"
