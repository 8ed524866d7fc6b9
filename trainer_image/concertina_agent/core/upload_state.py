"""What an agent knows about durable storage, and which of its shards are on their way there. Pure."""

from __future__ import annotations

import dataclasses
from typing import Optional

from concertina_protocol import Durable, Part, SnapshotId, Storage, StorageHealth, Undone
from concertina_protocol.worker_channel import WantDurable


class UploadState:
    def __init__(self, storage: Optional[Storage], *, is_named: bool = False) -> None:
        """`storage`: None for a job without durable storage; `is_named`: or with one that it has not used so far."""
        self.storage, self._is_named = storage, is_named
        self.parts: tuple[Part, ...] = ()
        """Of this round, in storage, not under LATEST."""
        self.undone: tuple[Undone, ...] = ()
        """By rollbacks: LATEST may name it still."""
        self._unshipped: set[tuple[SnapshotId, int]] = set()
        self._complete: set[SnapshotId] = set()
        self._wanted: set[tuple[SnapshotId, int]] = set()
        """Of this round, whether shipped or not."""

    def use(self) -> bool:
        """Storage that the job names is used from now on; false where it is already, or there is none."""
        if self.storage is not None or not self._is_named:
            return False
        self.storage = Storage(StorageHealth.UNKNOWN)
        return True

    @property
    def latest(self) -> Optional[Durable]:
        """What LATEST names, unless it was undone."""
        latest = self.storage.latest if self.storage else None
        return None if latest is None or self.voids(latest.round, latest.step) else latest

    def voids(self, round: int, step: int) -> bool:
        """Whether that state was undone."""
        return any(some.covers(round, step) for some in self.undone)

    @property
    def all_shipped(self) -> bool:
        return not self._unshipped

    def outdated(self, round: int) -> bool:
        """Whether LATEST may have been moved by rounds before this one that were not heard of (decision "Who was not of
        the last round looks at storage again")."""
        storage = self.storage
        if storage is None or storage.state == StorageHealth.UNKNOWN:
            return False
        return storage.round is None or storage.round < round - 1

    def new_round(self, round: int, undone: tuple[Undone, ...]) -> None:
        """As a member of this round: from now on its coordinator tells what LATEST is."""
        self.undone = undone
        if self.storage is not None and not self.outdated(round):
            self.storage = dataclasses.replace(self.storage, round=round)
        self.parts = ()
        self._unshipped.clear()
        self._complete.clear()
        self._wanted.clear()

    def wanted(self, message: WantDurable) -> None:
        """Instead of whatever else of this shard was on its way."""
        self._unshipped = {waiting for waiting in self._unshipped if waiting[1] != message.shard}
        self._unshipped.add((message.id, message.shard))
        self._wanted.add((message.id, message.shard))
        if message.complete:
            self._complete.add(message.id)

    def is_wanted(self, id: SnapshotId, shard: int) -> bool:
        return (id, shard) in self._wanted

    def is_coming(self, id: SnapshotId, shard: int) -> bool:
        """Whether it is on its way, or in storage."""
        arrived = any((part.id, part.shard) == (id, shard) for part in self.parts)
        return arrived or (id, shard) in self._unshipped

    def shipped(self, part: Part) -> None:
        part = dataclasses.replace(part, complete=part.id in self._complete)
        self.parts = (*(known for known in self.parts if known != part), part)
        self._unshipped.discard((part.id, part.shard))

    def moved(self, durable: Durable, round: int) -> None:
        """LATEST names this now; older parts are not waited for."""
        self.storage = Storage(StorageHealth.READY, durable, round=round)
        self.parts = tuple(part for part in self.parts if part.id.step > durable.step)
        self._unshipped = {waiting for waiting in self._unshipped if waiting[0].step > durable.step}

    def seen(self, storage: Storage, round: int) -> bool:
        """Take the news; false where it is none. What was known of LATEST outlasts trouble."""
        if storage.state == StorageHealth.ERROR and storage.latest is None:
            known = self.storage or storage
            storage = dataclasses.replace(storage, latest=known.latest, round=known.round)
        else:
            storage = dataclasses.replace(storage, round=round)
        news = self.storage is not None and storage != self.storage
        if news:
            self.storage = storage
        return news

    def has(self, uid: str, step: Optional[int], complete: bool) -> bool:
        """LATEST is this job's, of that step or later; `complete`: and of the run's end. Without storage: always."""
        latest = self.latest
        if self.storage is None:
            return True
        if latest is None or latest.uid != uid or (step is not None and latest.step < step):
            return False
        return latest.complete or not complete
