"""Snapshots in node memory: three slots, each a shard file that is written in place.

One slot holds the newest snapshot that is complete on the peers of all ranks, one the newest committed, and the third
is free to be written. A `slot-N.json` beside the file says that it is whole; it is taken away before the first byte
is changed, and put back when the last one stands. A file with a second name (a shard on its way to storage) is never
written: a new file takes its place, made ahead where there is room (decision "Room for the next snapshot is made beside
training").
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from concertina_protocol import SnapshotId
from concertina_protocol.sidecar import SNAPSHOT_SLOTS, Sidecar, remove_sidecar, write_sidecar
from concertina_state import file_space
from concertina_state.checksum import crc32
from concertina_state.file_space import Spare
from concertina_state.filling import THREADS
from concertina_state.format.shardfile import Layout, ShardMetadata
from concertina_state.live import Arrival, SnapshotSource


class MappedShard:
    """A shard file, mapped and with its pages in place, and a view of each array in it."""

    def __init__(self, path: Path, state: SnapshotSource, spare: Spare | None = None) -> None:
        """Raises InvalidInput or RestoreFailed."""
        self.path = path
        self._map = file_space.map_new(path, state.layout.size, spare)
        self.inode = path.stat().st_ino
        self._views = state.views(self._map)

    def fill(self, state: SnapshotSource) -> Arrival:
        """Copy the live state in, or have it copied; until `commit` the file is not there, so a peer whose copy this
        breaks off takes nothing for damaged (decision "A drain may write over a running copy")."""
        remove_sidecar(self.path)
        return state.copy_to(self._views)

    def commit(self, metadata: ShardMetadata, layout: Layout, threads: int = 1) -> None:
        """Commit what has arrived. `threads`: that compute its checksum."""
        self._map[: layout.data_begin] = layout.header(metadata)
        checksum = crc32(memoryview(self._map), threads)
        write_sidecar(self.path, Sidecar(metadata.id, metadata.shard, len(self._map), checksum))

    def give_up(self) -> mmap.mmap:
        """Its mapping, which nothing of it uses any more."""
        del self._views
        return self._map

    @property
    def shared(self) -> bool:
        """Whether the file has another name, or is no longer the one at its path."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return True
        return status.st_nlink > 1 or status.st_ino != self.inode


@dataclasses.dataclass(frozen=True)
class TakenSnapshot:
    id: SnapshotId
    path: Path


class Snapshots:
    """One rank's snapshots of one round. All ranks take the same ones, so ordinals agree between them."""

    def __init__(self, folder: Path, state: SnapshotSource) -> None:
        self._folder, self._state = folder, state
        self._slots: list[MappedShard | None] = [None] * SNAPSHOT_SLOTS
        self._holds = [-1] * SNAPSHOT_SLOTS
        self._steps: list[int] = []
        self.complete = -1
        """Ordinal of the newest one that is complete on the peers of all ranks."""
        self.device_seconds = 0.0
        """What the newest committed one has taken of a device's time; 0 where no device copies."""
        self._committer = ThreadPoolExecutor(1, "commit")
        self._committing: Future[None] | None = None
        self._making: Future[Spare | None] | None = None
        self._ready = -1
        """The slot that was found to need no new file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.make_room()

    def of_arrays(self, state: SnapshotSource) -> None:
        """Other ones are saved from now on; in files of their own size, where that is another."""
        self.finish()
        if state.layout.chunks != self._state.layout.chunks:
            self._slots, self._making, self._ready = [None] * SNAPSHOT_SLOTS, None, -1
        self._state = state

    @property
    def count(self) -> int:
        return len(self._steps)

    def step_of(self, ordinal: int) -> int | None:
        """None where there is no such snapshot."""
        return self._steps[ordinal] if 0 <= ordinal < len(self._steps) else None

    def copied(self, ordinal: int, copied_step: int | None) -> bool:
        """Whether this rank's snapshot of that ordinal is on its peer, which has all up to `copied_step`."""
        return ordinal < 0 or (copied_step is not None and copied_step >= self._steps[ordinal])

    @property
    def keeping_up(self) -> bool:
        """Whether the next one would leave alone what peers are still copying: the one before the last is complete
        (decision "The k-th snapshot waits for the (k-2)-th")."""
        return self.complete >= self.count - 2

    def take(self, metadata: ShardMetadata) -> TakenSnapshot:
        """Write and commit."""
        taken = self.begin(metadata, at_once=True)
        self.finish()
        return taken

    def begin(
        self,
        metadata: ShardMetadata,
        committed: Callable[[TakenSnapshot], None] = lambda taken: None,
        at_once: bool = False,
    ) -> TakenSnapshot:
        """Write, or have a device write; the checksum, which takes longer than the copy, is a thread's, and so is the
        commit: then `committed` is called there (decision "A snapshot's checksum is a thread's"). Where peers don't
        keep up this still leaves the newest complete one and the newest committed one untouched. `at_once`: the caller
        waits for the commit, so its checksum may have more threads than one."""
        self.finish()
        index, self._ready = self._next(), -1
        before = slot = self._slots[index]
        if slot is None or slot.shared:
            path = self._folder / f"slot-{index}"
            slot = self._slots[index] = MappedShard(path, self._state, self._spare())
        arrival, layout = slot.fill(self._state), self._state.layout
        self._holds[index] = self.count
        self._steps.append(metadata.id.step)
        taken = TakenSnapshot(metadata.id, slot.path)
        threads = min(THREADS, len(os.sched_getaffinity(0))) if at_once else 1

        def commit() -> None:
            self.device_seconds = arrival()
            slot.commit(metadata, layout, threads)
            committed(taken)

        self._committing = self._committer.submit(commit)
        if before is not None and before is not slot:
            self._committer.submit(file_space.unmap, before.give_up())
        return taken

    def make_room(self) -> None:
        """For the next one, where it needs any: by the thread that commits, behind what it is at, and so is the look
        whether it does: a call of the kernel would hand that thread the interpreter, and wait for it. Where there is
        none yet, the next call looks again, or `begin` waits for it (decision "Room for the next snapshot is made
        beside training")."""
        index = self._next()
        made = self._making
        if index == self._ready or (made is not None and (not made.done() or made.result() is not None)):
            return
        self._making = self._committer.submit(self._make, index)

    def _make(self, index: int) -> Spare | None:
        """In the thread."""
        slot = self._slots[index]
        if slot is None or slot.shared:
            return file_space.spare(self._folder, self._state.layout.size)
        self._ready = index
        return None

    def _spare(self) -> Spare | None:
        """What `make_room` has made; it is waited for."""
        made, self._making = self._making, None
        return made.result() if made is not None else None

    def _next(self) -> int:
        """Which slot is written next."""
        kept = {self.complete, self.count - 1}
        free = [index for index in range(SNAPSHOT_SLOTS) if self._holds[index] < 0 or self._holds[index] not in kept]
        return min(free, key=self._holds.__getitem__)

    def before_change(self) -> None:
        """See Live."""
        self._state.before_change()

    @property
    def waits(self) -> bool:
        """Whether `begin` would wait: for the commit of the last snapshot, or for the file of the next one."""
        return any(each is not None and not each.done() for each in (self._committing, self._making))

    def finish(self) -> None:
        """Wait until the last one is committed. Raises what went wrong there."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None

    def link_for_shipping(self, taken: TakenSnapshot) -> Path:
        """A second name for a committed slot, under which it stays as it is until that name is removed."""
        name = self._folder / f"shipping-{taken.id.step}"
        name.unlink(missing_ok=True)
        os.link(taken.path, name)
        return name

    @property
    def shipping(self) -> bool:
        """Whether a shard is still on its way to storage."""
        return any(name.startswith("shipping-") for name in os.listdir(self._folder))
