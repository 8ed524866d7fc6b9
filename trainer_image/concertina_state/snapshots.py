"""Snapshots in node memory: three slots, each a shard file that is written in place.

One slot holds the newest snapshot that is complete on the peers of all ranks, one the newest committed snapshot, and
the third is free to be written. A `slot-N.json` beside the file marks it as whole: it is removed before the first byte
is changed, and written again after the last one. A file with a second name (a shard on its way to storage) is never
written. A new file takes its place, which is allocated ahead if there is space (decision "Room for the next snapshot is
made beside training").
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
    """Shard file, mapped and with its pages allocated, and a view of each array in it."""

    def __init__(self, path: Path, state: SnapshotSource, spare: Spare | None = None) -> None:
        """Map a new file at `path`, or the spare one.

        Raises:
            InvalidInput: When the volume is too small.
            RestoreFailed: When there is no space beside the snapshots of the previous round.
        """
        self.path = path
        self._map = file_space.map_new(path, state.layout.size, spare)
        self.inode = path.stat().st_ino
        self._views = state.views(self._map)

    def fill(self, state: SnapshotSource) -> Arrival:
        """Copy the live state into the file, or have a device copy it.

        The file counts as missing until `commit`. A peer whose copy is interrupted by this does not report damage
        (decision "A drain may write over a running copy").
        """
        remove_sidecar(self.path)
        return state.copy_to(self._views)

    def commit(self, metadata: ShardMetadata, layout: Layout, threads: int = 1) -> None:
        """Commit the contents that have arrived. `threads` threads compute the checksum."""
        self._map[: layout.data_begin] = layout.header(metadata)
        checksum = crc32(memoryview(self._map), threads)
        write_sidecar(self.path, Sidecar(metadata.id, metadata.shard, len(self._map), checksum))

    def give_up(self) -> mmap.mmap:
        """Return the mapping, after dropping all views of it."""
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
    """Snapshots of one rank in one round. All ranks take the same ones, so ordinals agree between ranks."""

    def __init__(self, folder: Path, state: SnapshotSource) -> None:
        self._folder, self._state = folder, state
        self._slots: list[MappedShard | None] = [None] * SNAPSHOT_SLOTS
        self._holds = [-1] * SNAPSHOT_SLOTS
        self._steps: list[int] = []
        self.complete = -1
        """Ordinal of the newest snapshot that is complete on the peers of all ranks."""
        self.device_seconds = 0.0
        """Seconds of a device's time that the newest committed snapshot took; 0 if no device copies."""
        self._committer = ThreadPoolExecutor(1, "commit")
        self._committing: Future[None] | None = None
        self._making: Future[Spare | None] | None = None
        self._ready = -1
        """Index of the slot that was found to need no new file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.make_room()

    def of_arrays(self, state: SnapshotSource) -> None:
        """Save other arrays from now on. If their layout differs, they get new files of their own size."""
        self.finish()
        if state.layout.chunks != self._state.layout.chunks:
            self._slots, self._making, self._ready = [None] * SNAPSHOT_SLOTS, None, -1
        self._state = state

    @property
    def count(self) -> int:
        return len(self._steps)

    def step_of(self, ordinal: int) -> int | None:
        """Return the step of a snapshot, or None if there is no such snapshot."""
        return self._steps[ordinal] if 0 <= ordinal < len(self._steps) else None

    def copied(self, ordinal: int, copied_step: int | None) -> bool:
        """Return whether this rank's snapshot of that ordinal is on its peer, which has all up to `copied_step`."""
        return ordinal < 0 or (copied_step is not None and copied_step >= self._steps[ordinal])

    @property
    def keeping_up(self) -> bool:
        """Whether the next snapshot would not overwrite one that peers are still copying.

        That is so if the snapshot before the last is complete (decision "The k-th snapshot waits for the (k-2)-th").
        """
        return self.complete >= self.count - 2

    def take(self, metadata: ShardMetadata) -> TakenSnapshot:
        """Write and commit a snapshot."""
        snapshot = self.begin(metadata, at_once=True)
        self.finish()
        return snapshot

    def begin(
        self,
        metadata: ShardMetadata,
        committed: Callable[[TakenSnapshot], None] = lambda snapshot: None,
        at_once: bool = False,
    ) -> TakenSnapshot:
        """Write a snapshot, or have a device write it, and commit it in a thread.

        The checksum takes longer than the copy, so the thread computes it too, and then calls `committed` (decision "A
        snapshot's checksum is a thread's"). If peers do not keep up, this still leaves the newest complete snapshot and
        the newest committed one untouched.

        Args:
            metadata: Metadata of the snapshot.
            committed: Function to call in the thread after the commit.
            at_once: Whether the caller waits for the commit, so that several threads may compute the checksum.
        """
        self.finish()
        index, self._ready = self._next(), -1
        previous_slot = slot = self._slots[index]
        if slot is None or slot.shared:
            path = self._folder / f"slot-{index}"
            slot = self._slots[index] = MappedShard(path, self._state, self._spare())
        arrival, layout = slot.fill(self._state), self._state.layout
        self._holds[index] = self.count
        self._steps.append(metadata.id.step)
        snapshot = TakenSnapshot(metadata.id, slot.path)
        threads = min(THREADS, len(os.sched_getaffinity(0))) if at_once else 1

        def commit() -> None:
            self.device_seconds = arrival()
            slot.commit(metadata, layout, threads)
            committed(snapshot)

        self._committing = self._committer.submit(commit)
        if previous_slot is not None and previous_slot is not slot:
            self._committer.submit(file_space.unmap, previous_slot.give_up())
        return snapshot

    def make_room(self) -> None:
        """Allocate a file for the next snapshot if it needs one.

        The committing thread does this after its present work. It also checks whether a file is needed, because a
        system call here would hand that thread the GIL and wait for it. If the file is not ready, the next call checks
        again, or `begin` waits for it (decision "Room for the next snapshot is made beside training").
        """
        index = self._next()
        future = self._making
        if index == self._ready or (future is not None and (not future.done() or future.result() is not None)):
            return
        self._making = self._committer.submit(self._make, index)

    def _make(self, index: int) -> Spare | None:
        """Allocate the file in the thread, if the slot needs a new one."""
        slot = self._slots[index]
        if slot is None or slot.shared:
            return file_space.spare(self._folder, self._state.layout.size)
        self._ready = index
        return None

    def _spare(self) -> Spare | None:
        """Wait for the file that `make_room` allocates, and return it."""
        future, self._making = self._making, None
        return future.result() if future is not None else None

    def _next(self) -> int:
        """Return the index of the slot that is written next."""
        needed_ordinals = {self.complete, self.count - 1}
        free = [
            index
            for index in range(SNAPSHOT_SLOTS)
            if self._holds[index] < 0 or self._holds[index] not in needed_ordinals
        ]
        return min(free, key=self._holds.__getitem__)

    def before_change(self) -> None:
        """Order following changes after the last copy; see SnapshotSource."""
        self._state.before_change()

    @property
    def waits(self) -> bool:
        """Whether `begin` would wait for the commit of the last snapshot, or for the file of the next one."""
        return any(future is not None and not future.done() for future in (self._committing, self._making))

    def finish(self) -> None:
        """Wait until the last snapshot is committed. An error of the commit is raised here."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None

    def close(self) -> None:
        """Wait until the thread has ended, and unmap the files, which stay."""
        self._committer.shutdown()
        for slot in self._slots:
            if slot is not None:
                file_space.unmap(slot.give_up())
        self._slots, self._making = [None] * SNAPSHOT_SLOTS, None

    def link_for_shipping(self, snapshot: TakenSnapshot) -> Path:
        """Give a committed slot a second name, and return it. The file does not change until that name is removed."""
        name = self._folder / f"shipping-{snapshot.id.step}"
        name.unlink(missing_ok=True)
        os.link(snapshot.path, name)
        return name

    @property
    def shipping(self) -> bool:
        """Whether a shard is still on its way to storage."""
        return any(name.startswith("shipping-") for name in os.listdir(self._folder))
