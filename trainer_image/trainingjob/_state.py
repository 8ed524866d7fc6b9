"""`trainingjob.State`: a script's state in node memory, on peers and in durable storage.

Saving is the bundled trainer's (`concertina_state.saving`). A script says only when a step is finished, so ranks agree
only in the steps that are saved. Rank 0 says how far apart these are. A step is saved at a save point, right after an
optimizer step: see `_save_points`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import weakref
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainingjob
from concertina_protocol import Durable, Restore, RestoreSource, SnapshotId
from concertina_protocol.stderr import log
from concertina_protocol.worker_channel import Done, KeepsState, Outcome, Start
from concertina_state.errors import BadInput
from concertina_state.filling import ShardReader
from concertina_state.format.shardfile import Continued, Header, ShardMetadata
from concertina_state.interval import Interval
from concertina_state.lineage import Origin, TrainedRound, of_round, script_digest
from concertina_state.pace import Pace
from concertina_state.saved import InMemory, SavedState, find
from concertina_state.saving import SavePolicy, Saving, StepFlags
from concertina_state.snapshots import Snapshots
from trainingjob import _objects, _storage, _values
from trainingjob._channel import Channel
from trainingjob._counted import Counted
from trainingjob._folder import Folder
from trainingjob._ranks import Catalogue, Gather, all_alike, halves, ranks
from trainingjob._refusals import INSTEAD, NotSavable, told

if TYPE_CHECKING:
    from trainingjob._loaders import Loaders
    from trainingjob._save_points import SavePoints

SUSPICIOUS = 10
"""Commits without a step of an optimizer that is kept, while others step, before this is an error."""
PATIENCE = 100
"""Commits without a snapshot that was due, before the script is told."""
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
    pending: bool
    """Gradients of some rank wait for an optimizer step."""
    buffers_alike: bool
    """All ranks have the same buffers."""


NOTHING_KNOWN = Restore(RestoreSource.FRESH)


class State:
    def __init__(
        self, *, folder: str = "checkpoints", overhead: float = 0.01, gather: Gather | None = None, **objects: Any
    ) -> None:
        """`folder`: where there is no job. `overhead`: part of the time that snapshots may take. `gather`: how several
        processes agree where that is not torch.distributed: it takes a rank's bytes and returns those of all, in their
        order. Raises concertina_state.errors.BadInput: for an object that has no state or can't be saved (a TypeError
        too), for a second State in one process, for a folder to which another process saves, and if ranks can't
        agree."""
        self._world = trainingjob.world()
        with told():
            _check_only()
            self._ranks = ranks(self._world, gather)
        self._kept: dict[str, _objects.Kept] = {}
        self._save_points: SavePoints | None = None
        self._loaders: Loaders | None = None
        self.add(**objects)
        self._checkpoint: Mapping[str, Any] = json.loads(os.environ.get("CONCERTINA_CHECKPOINT") or "null") or {}
        channel = trainingjob.connection()
        with told():
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
        self._durable_due = False
        """A durable commit waits for a save point."""
        self._waiting = 0
        """Commits since a snapshot was due."""
        self._checks, self._checked = 1, 0
        """Which snapshot is checked next for arrays that all ranks should hold alike, and how many there were."""
        self._catalogue: Catalogue | None = None
        self._own = bytearray(1)
        """This rank's values, as they stand in its shard."""
        self._own_bytes = self._ranks.memory(self._own)
        self._by_rank = False
        """Each rank keeps its own buffers, as they differ."""
        self._shared: Mapping[str, Any] = {}
        """Else the buffers, which all ranks have alike."""
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
        global _only
        _only = weakref.ref(self)

    def add(self, **objects: Any) -> None:
        """Keep more objects. Call it before `restore`, for those that a framework makes once it knows where it goes on.
        Pass an optimizer together with the modules that it trains. Raises as State does."""
        with told():
            for reserved, what in (("random", "random numbers are"), ("loaders", "positions of `batches` are")):
                if reserved in objects:
                    raise NotSavable(f"{reserved} is what {what} called: give this object another name")
            added = _objects.kept(objects, self._ranks.with_torch, self._kept)
            self._watch(objects, added)
        self._kept = {**self._kept, **added}
        self._kept.pop("random", None)
        # Put back last, as putting back others may draw.
        self._kept["random"] = _objects.KeptStateful(_objects.RandomNumbers())

    def _watch(self, objects: Mapping[str, Any], added: Mapping[str, _objects.Kept]) -> None:
        """Refuse tensors that can't be saved, and follow the optimizers' steps."""
        if "torch" not in sys.modules:
            return
        from torch.optim import Optimizer

        from trainingjob._loaders import Loaders
        from trainingjob._save_points import SavePoints
        from trainingjob._torch_objects import check_kinds

        check_kinds(added)
        self._save_points = self._save_points or SavePoints()
        self._save_points.watch(value for value in objects.values() if isinstance(value, Optimizer))
        if self._loaders is None:
            self._loaders = Loaders()
            self._kept["loaders"] = _objects.KeptStateful(self._loaders)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over one pass of a torch `DataLoader`, whose position is saved with the state.

        After `restore`, the first call for a loader goes on with the rest of the pass in which the state was saved, in
        the same order. A `DistributedSampler` is followed in a world of another size too. Use the loaders in the same
        order in each run. Raises BadInput for a loader that has no sampler, and if the script is at another epoch."""
        if self._loaders is None:
            raise NotSavable("State.batches() takes a torch.utils.data.DataLoader: import torch before State is made")
        with told():
            return self._loaders.batches(loader)

    # --- back -------------------------------------------------------------------------------------------------------

    def peek(self, name: str) -> Any:
        """What `state_dict()` of one object gave in the newest saved state, for this rank, before that object is there;
        None where nothing was saved. `restore` takes the same state then."""
        with told(), contextlib.ExitStack() as failed:
            failed.enter_context(self._reading)
            self._found = self._newest()
            found = None
            if self._found is not None:
                found = self._values_in(*self._own_shard(self._found), self._found).get(name)
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
            shard, source = self._own_shard(saved)
            values = self._values_in(shard, source, saved)
            if left_out := sorted(values.keys() - self._kept.keys() - {"loaders"}):
                raise BadInput(f"the saved state of step {saved.id.step} has {', '.join(left_out)} too: {INSTEAD}.")
            if lacking := [name for name in self._kept if name not in values]:
                raise BadInput(f"the saved state of step {saved.id.step} has no {', '.join(lacking)}: {INSTEAD}.")
            for name, each in self._kept.items():
                each.prepare(values[name])
            arrays = self._arrays()
            buffers = self._buffers()
            self._by_rank = any(f"{source}.{name}" in shard.header.chunks for name in buffers)
            catalogue = self._catalogue = self._new_catalogue(arrays, buffers)
            layout = self._agree(StepFlags(), catalogue).layout
            same = (saved.id.layout, saved.id.shards) == (layout, self._world.size)
            alone = self._world.rank if same and catalogue.alone else None
            found = find(saved, alone, lambda held: catalogue.plan(held, INSTEAD))
            dicts = [name for name, each in self._kept.items() if isinstance(each, _objects.KeptDict)]
            names = {*arrays, *buffers, *(f"{source}.{name}" for name in buffers)}
            _check_nothing_lost(found.headers, names, self._kept.keys() - dicts, source)
            catalogue.fill(found.plan, found.shards)
            if self._by_rank:
                self._ranks.fill_own(buffers, shard, f"{source}.")
            place = RestoreSource.MEMORY if isinstance(saved, InMemory) else RestoreSource.STORAGE
            if place is RestoreSource.STORAGE:
                self._ranks.sums([0.0])  # all have read it
            self._goes_on_from(found.metadata)
            for name, each in self._kept.items():
                each.load(values[name])
        if self._world.rank >= saved.id.shards:
            _objects.RandomNumbers().draw_others(self._world.rank)
        self._log_other_size(saved.id.shards, source)
        if self._loaders is not None:
            self._loaders.restored()
        if self._save_points is not None:
            self._save_points.pass_commit()  # torch makes a step of an FSDP1 optimizer that has no moments yet
        self._restored = saved.id.step
        self._end.restored(saved.id.step, place)
        with told():
            # Room for the first snapshot is made while the script computes its step.
            self._cataloged(self._arrays(), self._buffers(), values)
            if place is RestoreSource.MEMORY and self._checkpoint and found.metadata.waited_for:
                self._save_again(found.metadata, layout)
        return saved.id.step

    def _log_other_size(self, saved_size: int, source: str) -> None:
        """Log where each rank's own values come from, and which are left out, if the world has another size."""
        rank, size = self._world.rank, self._world.size
        own = "for itself (buffers, values, positions in data)"
        if rank >= saved_size:
            text = f"rank {rank} is new, and takes what each rank has {own} from {source}, but for random numbers"
        elif rank == 0 and size < saved_size:
            text = f"what each rank from {_name(size)} on had {own} is left out"
        else:
            return
        log(f"trainingjob: the saved state is of {saved_size} ranks: {text}")

    def _save_again(self, saved: ShardMetadata, layout: str) -> None:
        """In this round: a script that was through with it commits nothing more, and a round's agents bring to storage
        what was committed in it (decision "What may be a script's last step is saved again")."""
        arrays, values = self._now()
        _, snapshots = self._cataloged(arrays, self._buffers(), values)
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
                return _newest_in(self._checkpoint, self._reading, start.restore)
            except StorageError as error:
                if time.monotonic() > until:
                    raise
                log(f"trainingjob: durable storage can't be read, tried again: {error}")
                time.sleep(STORAGE_PAUSE if isinstance(error, StoreRefused) else 1.0)

    def _own_shard(self, saved: SavedState) -> tuple[ShardReader, str]:
        """Return the shard of the rank of the same number, and that rank's name: if there are more ranks now, the new
        ones begin with what another had."""
        number = self._world.rank % saved.id.shards
        return saved.open(number), _name(number)

    def _values_in(self, shard: ShardReader, rank: str, saved: SavedState) -> Any:
        stored = shard.header.chunks.get(rank)
        if stored is None:
            raise BadInput(f"the saved state of step {saved.id.step} was not saved by trainingjob.State")
        data = bytearray(stored.chunk.size)
        shard.read_into([(stored.begin, memoryview(data))])
        return _values.decode(bytes(data))

    # --- forth ------------------------------------------------------------------------------------------------------

    def commit(self, step: int, durable: bool = False) -> None:
        """Say that step `step`, counted from 0, is finished. Call it on all ranks, after every step or micro-batch.

        Only a commit after an optimizer step is saved: one within a gradient accumulation would lose the gradients that
        it has summed up. When this world is about to end, the first such commit saves and ends the process
        (SystemExit).

        `durable`: wait until this step is whole in node memory, and make it a checkpoint in storage (or the next one,
        if another is still on its way there). The same on all ranks; True for the script's last step. Within an
        accumulation, the next optimizer step is made durable instead."""
        began, done = time.perf_counter(), int(step) + 1
        if self._began is not None:
            self._pace.stepped(began - self._began, self._saved)
        self._began = began
        self._commits += 1
        ends = self._end.passes()
        at_save_point = self._save_points is None or self._save_points.pass_commit()
        self._durable_due |= durable
        due = ends or self._durable_due or self._commits >= self._next
        self._saved = due and at_save_point and self._save(done, self._durable_due, ends)
        if due and not self._saved:
            self._say_what_waits(done, durable)
        saving = self._saving
        self._end.finished(done, saving.snapshot_step if saving else None, saving.seconds if saving else 0.0)
        if ends and self._saved:
            self._end.send(Done(Outcome.DRAINED, done))
            raise SystemExit(0)

    def _say_what_waits(self, done: int, durable: bool) -> None:
        self._waiting += 1
        if self._waiting >= SUSPICIOUS and self._save_points is not None and self._save_points.only_others_step:
            with told():
                raise BadInput(
                    f"no optimizer that State keeps has made a step in {self._waiting} commits, and another one has: "
                    "its moments would be lost. Give State the optimizer that steps."
                )
        if durable:
            text = f"step {done} ends within a gradient accumulation: the next optimizer step becomes durable instead"
            advice = "Call commit(durable=True) right after optimizer.step()"
        elif self._waiting == PATIENCE:
            text = f"nothing was saved in the last {PATIENCE} commits, as gradients wait for an optimizer step"
            advice = "Call commit() right after optimizer.step(), and give State the optimizers that step"
        else:
            return
        log(f"trainingjob: {text}. {advice}.")

    def _save(self, done: int, durable: bool, ends: bool) -> bool:
        """Take a snapshot, unless gradients wait for a step."""
        started = time.perf_counter()
        pending = self._save_points is not None and self._save_points.has_pending_gradients()
        with told():
            catalogue, saving = self._current()
            digest = self._ranks.digest(self._shared) if self._world.size > 1 else 0
        ready = time.perf_counter()
        flags = dataclasses.replace(saving.local_flags(done), drain=int(ends))
        if durable:
            flags = dataclasses.replace(flags, checkpoint_due=1)
        agreed = self._agree(flags, catalogue, digest, pending)
        if not agreed.buffers_alike:
            self._by_rank = True
            with told():
                catalogue, saving = self._current()
            agreed = self._agree(flags, catalogue, pending=pending)
        together = time.perf_counter()  # others are waited for until then, as they are in each step
        if agreed.pending:
            return False
        saving.of_layout(agreed.layout, waited_for=durable)
        saving.save(saving.decide(done, agreed.flags, required=durable), self._samples() if self._data else done)
        # A script may change anything next, not only what its optimizer steps (decision "A script's snapshot is copied
        # before commit returns").
        saving.before_change()
        if durable:
            saving.finish()  # the script may end at once
        self._durable_due, self._waiting = False, 0
        self._next = self._commits + agreed.every
        if self._commits > 1:  # the first one finds memory
            copying = max(time.perf_counter() - together, saving.device_seconds)
            self._pace.took(ready - started + copying)
        return True

    def _current(self) -> tuple[Catalogue, Saving]:
        """With what there is now."""
        arrays, values = self._now()
        catalogue, snapshots = self._cataloged(arrays, self._buffers(), values)
        self._checked += 1
        if self._checked >= self._checks:
            self._checks *= 2
            self._check_alike()
        if self._saving is None:
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

    def _cataloged(
        self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[Catalogue, Snapshots]:
        """Return the catalogue of these, which is made anew if they are others than before, and its snapshots."""
        text = _values.encode(values, "state")
        if len(text) > len(self._own):
            self._own = bytearray(int(len(text) * ROOM) + 4096)
            self._own_bytes = self._ranks.memory(self._own)
        self._shared = {} if self._by_rank else buffers
        now = {**arrays, **self._shared, **self._own_arrays(buffers)}
        if self._catalogue is None or not self._catalogue.still(now):
            self._catalogue = self._new_catalogue(arrays, buffers)
            if self._snapshots is not None:
                self._snapshots.of_arrays(self._catalogue.saved)
        if self._snapshots is None:
            self._snapshots = Snapshots(self._end.snapshots / f"shard-{self._world.rank}", self._catalogue.saved)
        self._own[:] = text.ljust(len(self._own))
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

    def _buffers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, each in self._kept.items():
            found |= self._of_library(name, each.buffers())
        return found

    def _own_arrays(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank alone has, by names of its own."""
        rank = _name(self._world.rank)
        return {rank: self._own_bytes} | (
            {f"{rank}.{name}": buffer for name, buffer in buffers.items()} if self._by_rank else {}
        )

    def _new_catalogue(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any]) -> Catalogue:
        return self._ranks.catalogue(arrays, {} if self._by_rank else buffers, self._own_arrays(buffers))

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

    def _agree(self, flags: StepFlags, catalogue: Catalogue, digest: int = 0, pending: bool = False) -> Agreed:
        """The one collective of a save: sums of a few numbers. `digest`: of buffers that all ranks may have alike."""
        size = self._world.size
        mine = int(catalogue.digest[:8], 16)
        every = self._pace.every if self._world.rank == 0 else 0
        numbers = [float(each) for each in (*dataclasses.astuple(flags), every, mine, pending)]
        *counts, low, low2, high, high2 = self._ranks.sums([*numbers, *halves(digest)])
        *of_flags, every, layout, waiting = (round(number) for number in counts)
        alike = all_alike(size, low, low2) and all_alike(size, high, high2)
        return Agreed(StepFlags(*of_flags), every, f"{layout:x}", waiting > 0, alike)

    def _check_alike(self) -> None:
        """Each rank saves a part of what all hold whole: it is an error if that is not the same on all ranks. It may
        come to differ later, so this is asked again, each time after twice as many snapshots."""
        if self._world.size == 1:
            return
        whole: dict[str, Any] = {}
        for name, each in self._kept.items():
            whole |= self._of_library(name, each.alike())
        differs = self._ranks.differing(whole)
        if differs:
            raise BadInput(
                f"{differs[0]} is not the same on all ranks, and no DTensor that says how it is cut: make it "
                "one (torch.distributed.tensor), or let DistributedDataParallel keep it the same; of an array in a "
                f"dict, say which part it is (trainingjob.ArrayShard). ({len(differs)} of {len(whole)} differ.)"
            )


_only: weakref.ref[State] | None = None
"""The State of this process."""


def _check_only() -> None:
    """Two would write into each other's shards."""
    if _only is not None and _only() is not None:
        raise BadInput(
            "this process has a State already, and two would write into each other's files: give all objects to one, "
            "by State(...) or State.add(...)."
        )


def _check_nothing_lost(
    headers: Mapping[int, Header], names: Container[str], objects: Collection[str], rank: str
) -> None:
    """Refuse a saved state that holds arrays of these objects that they have no more: a layer that was taken away, say.

    `rank` is the one whose own arrays are read. Raises BadInput."""
    prefixes = (*(f"{name}." for name in objects), *(f"{rank}.{name}." for name in objects))
    for header in headers.values():
        for name in header.chunks:
            if name.startswith(prefixes) and name not in names:
                array = name.removeprefix(f"{rank}.")
                raise BadInput(f"the saved state has {array}, and the script has it no more: {INSTEAD}.")


def _newer(start: Start, held: SnapshotId) -> Durable | None:
    """What LATEST names, where that is of this job, and newer than what memory holds."""
    known = start.durable
    if known is None or known.uid != start.uid or start.restore.bars(known, start.uid):
        return None
    return known if (known.round, known.step) > (held.round, held.step) else None


def _newest_in(
    checkpoint: Mapping[str, Any], reading: contextlib.ExitStack, restore: Restore = NOTHING_KNOWN
) -> Durable | None:
    """Return the newest checkpoint in the job's own folder, or the one that the job is to begin with, which stays while
    `reading` is open. `restore`: what was undone, or is damaged. Raises StorageError, or BadInput."""
    from concertina_state.checkpoints import owner
    from concertina_state.checkpoints.latest import read_latest
    from concertina_state.checkpoints.reader import opened, resolve
    from concertina_state.checkpoints.rollback import none_left, usable
    from concertina_state.objects.prefix import ObjectPrefix

    own_folder = ObjectPrefix(checkpoint["uri"], create=True)
    found, uid = read_latest(own_folder), os.environ.get("CONCERTINA_UID", "")
    if found and found.uid != uid:
        try:
            owner.look(own_folder, owner.this_job(uid), checkpoint.get("takeOver") or "")
        except owner.NotOwner as error:
            raise BadInput(str(error)) from error
    found = found and usable(found, uid, restore)
    if found is None and restore.damaged:
        raise none_left(restore.damaged)
    another = checkpoint.get("resumeFrom")
    folder = found.uri if found else resolve(another) if another else ""
    if not folder:
        return None
    place = reading.enter_context(opened(folder)).manifest.place
    return found or Durable(place.uid, place.round, place.step, folder)


def _name(rank: int) -> str:
    return f"rank-{rank}"
