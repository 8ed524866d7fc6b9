"""Snapshots in node memory. Each rank has three slots, which are shard files that are written in place.

The three slots contain:
- the newest snapshot whose shards have all been copied to another replica (the peer)
- the newest complete snapshot
- the next snapshot, which is being written

The contents of a slot are complete if there is a file `slot-N.json` beside it. This file is removed before the first
byte of the slot is changed, and written after the last one.

While a shard is being uploaded, its file has a second name (a hard link). A file with a second name is never changed:
the slot gets a new file instead. The new file is allocated in advance if there is space (decision "A thread allocates
the next snapshot's file").
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
    """Shard file that is completely mapped into memory, with a view of each array in the file."""

    def __init__(self, path: Path, state: SnapshotSource, spare: Spare | None = None) -> None:
        """Map a new file at `path`. If `spare` is given, it is used as that file.

        Raises:
            InvalidInput: When the volume is too small.
            RestoreFailed: When the snapshots of the previous round take so much space that there is none for the file.
        """
        self.path = path
        self._map = file_space.map_new(path, state.layout.size, spare)
        self.inode = path.stat().st_ino
        self._views = state.views(self._map)

    def fill(self, state: SnapshotSource) -> Arrival:
        """Copy the present state into the file, or make a device start that copy.

        Until `commit`, the file counts as missing. Another replica that is copying the file at this moment does not
        report damage (decision "A drain may write over a running copy").

        In a drain, all ranks stop after the same step.
        """
        remove_sidecar(self.path)
        return state.copy_to(self._views)

    def commit(self, metadata: ShardMetadata, layout: Layout, threads: int = 1) -> None:
        """Write the sidecar of the shard file, once the file's contents are complete. The file is valid from then on.

        `threads` is the number of threads that compute the checksum.
        """
        self._map[: layout.data_begin] = layout.header(metadata)
        checksum = crc32(memoryview(self._map), threads)
        write_sidecar(self.path, Sidecar(metadata.id, metadata.shard, len(self._map), checksum))

    def give_up(self) -> mmap.mmap:
        """Delete all views of the mapped file, and return the mapping, so that the caller can unmap it."""
        del self._views
        return self._map

    @property
    def shared(self) -> bool:
        """True if the file must not be overwritten, because it has a second name, or is no longer the file at its path.

        The second name is a hard link, which exists while the shard is being uploaded.
        """
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
    """Snapshots of one rank in one round.

    A snapshot is a copy of the training state in node memory. All ranks take snapshots after the same steps, so a
    snapshot has the same number on all ranks.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, folder: Path, state: SnapshotSource) -> None:
        self._folder, self._state = folder, state
        self._slots: list[MappedShard | None] = [None] * SNAPSHOT_SLOTS
        self._holds = [-1] * SNAPSHOT_SLOTS
        self._steps: list[int] = []
        self.complete = -1
        """Number of the newest snapshot whose shards are all copied to another replica, or -1 if there is none."""
        self.device_seconds = 0.0
        """Seconds that a device took to copy the newest committed snapshot, or 0 if no device copies."""
        self._committer = ThreadPoolExecutor(1, "commit")
        self._committing: Future[None] | None = None
        self._making: Future[Spare | None] | None = None
        self._ready = -1
        """Index of a slot whose present file may be overwritten, so that no new file is needed, or -1."""
        folder.mkdir(parents=True, exist_ok=True)
        self.make_room()

    def of_arrays(self, state: SnapshotSource) -> None:
        """Take further snapshots of the arrays of `state`. If their layout is new, allocate new files."""
        self.finish()
        if state.layout.chunks != self._state.layout.chunks:
            self._slots, self._making, self._ready = [None] * SNAPSHOT_SLOTS, None, -1
        self._state = state

    @property
    def count(self) -> int:
        return len(self._steps)

    def step_of(self, ordinal: int) -> int | None:
        """Return the step of snapshot number `ordinal`, or None if there is no such snapshot."""
        return self._steps[ordinal] if 0 <= ordinal < len(self._steps) else None

    def copied(self, ordinal: int, copied_step: int | None) -> bool:
        """Return whether another replica has a copy of this rank's shard of snapshot number `ordinal`.

        `copied_step` is the step up to which that replica has copies.
        """
        return ordinal < 0 or (copied_step is not None and copied_step >= self._steps[ordinal])

    @property
    def keeping_up(self) -> bool:
        """True if the next snapshot would not overwrite a snapshot that other replicas are still copying.

        For this, other replicas must have completely copied the snapshot before the last one (decision "Snapshot k
        waits for copies of snapshot k-2").
        """
        return self.complete >= self.count - 2

    def take(self, metadata: ShardMetadata) -> TakenSnapshot:
        """Write a snapshot, and wait until it is committed."""
        snapshot = self.begin(metadata, at_once=True)
        self.finish()
        return snapshot

    def begin(
        self,
        metadata: ShardMetadata,
        committed: Callable[[TakenSnapshot], None] = lambda snapshot: None,
        at_once: bool = False,
    ) -> TakenSnapshot:
        """Write a snapshot, or make a device start its copy. A thread commits the snapshot later.

        The thread also computes the checksum, because that takes longer than the copy. Then it calls `committed`
        (decision "A thread computes a snapshot's checksum"). Two snapshots are never overwritten, even if other
        replicas copy slowly. These are the newest snapshot whose shards all have a copy on another replica, and the
        newest committed snapshot.

        Args:
            metadata: Metadata of the snapshot.
            committed: Function that the thread calls after the commit.
            at_once: Whether the caller waits for the commit. If so, several threads compute the checksum.
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
        """Make the committing thread allocate a file for the next snapshot, if that snapshot needs a new file.

        The thread allocates the file after its present work. The thread also checks whether a new file is needed. In
        the training thread, the system call of this check would release the GIL, and training would have to wait to get
        the GIL back. If the file is not ready in time, `begin` waits for the file (decision "A thread allocates the
        next snapshot's file").
        """
        index = self._next()
        future = self._making
        if index == self._ready or (future is not None and (not future.done() or future.result() is not None)):
            return
        self._making = self._committer.submit(self._make, index)

    def _make(self, index: int) -> Spare | None:
        """Return a new file for slot `index`, or None if the slot needs none.

        The committing thread calls this method.
        """
        slot = self._slots[index]
        if slot is None or slot.shared:
            return file_space.spare(self._folder, self._state.layout.size)
        self._ready = index
        return None

    def _spare(self) -> Spare | None:
        """Return the file that `make_room` allocates, after waiting for it. Return None if no file was requested."""
        future, self._making = self._making, None
        return future.result() if future is not None else None

    def _next(self) -> int:
        """Return the index of the slot for the next snapshot."""
        needed_ordinals = {self.complete, self.count - 1}
        free = [
            index
            for index in range(SNAPSHOT_SLOTS)
            if self._holds[index] < 0 or self._holds[index] not in needed_ordinals
        ]
        return min(free, key=self._holds.__getitem__)

    def before_change(self) -> None:
        """Make devices finish their copies before they execute later work that may change the arrays."""
        self._state.before_change()

    @property
    def waits(self) -> bool:
        """True if `begin` would have to wait: for the commit of the last snapshot, or for the file of the next one."""
        return any(future is not None and not future.done() for future in (self._committing, self._making))

    def finish(self) -> None:
        """Wait until the last snapshot is committed. An error of the commit is raised here."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None

    def close(self) -> None:
        """Wait until the committing thread has ended, and unmap the files. The files are not deleted."""
        self._committer.shutdown()
        for slot in self._slots:
            if slot is not None:
                file_space.unmap(slot.give_up())
        self._slots, self._making = [None] * SNAPSHOT_SLOTS, None

    def link_for_shipping(self, snapshot: TakenSnapshot) -> Path:
        """Create a hard link to the file of a committed snapshot, for its upload, and return the link's path.

        The file does not change as long as the link exists.
        """
        name = self._folder / f"shipping-{snapshot.id.step}"
        name.unlink(missing_ok=True)
        os.link(snapshot.path, name)
        return name

    @property
    def shipping(self) -> bool:
        """True if a shard of this rank is still being uploaded to storage."""
        return any(name.startswith("shipping-") for name in os.listdir(self._folder))
