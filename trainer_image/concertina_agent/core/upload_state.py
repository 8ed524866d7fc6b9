"""Facts that an agent knows about durable storage and about its uploads. The module has no side effects."""

from __future__ import annotations

import dataclasses
from typing import Optional

from concertina_protocol import Durable, Part, SnapshotId, Storage, StorageHealth, Undone
from concertina_protocol.worker_channel import WantDurable


class UploadState:
    """State of durable storage and of the uploads of this agent's shards."""

    def __init__(self, storage: Optional[Storage], *, is_named: bool = False) -> None:
        """Record which durable storage the job has.

        Args:
            storage: State of storage, or None if the job does not use durable storage.
            is_named: Whether the job specifies storage that its script may start to use.
        """
        self.storage, self._is_named = storage, is_named
        self.parts: tuple[Part, ...] = ()
        """Shards of this round that are in storage, while LATEST does not name their checkpoint yet."""
        self.undone: tuple[Undone, ...] = ()
        """States that rollbacks made invalid. LATEST may still name one of them."""
        self._unshipped: set[tuple[SnapshotId, int]] = set()
        self._complete: set[SnapshotId] = set()
        self._wanted: set[tuple[SnapshotId, int]] = set()
        """Shards of this round whose upload was requested, whether or not it has finished."""

    def use(self) -> bool:
        """Start to use the storage that the job specifies.

        Return False if it is already used, or if the job specifies none.
        """
        if self.storage is not None or not self._is_named:
            return False
        self.storage = Storage(StorageHealth.UNKNOWN)
        return True

    @property
    def latest(self) -> Optional[Durable]:
        """Checkpoint that the file LATEST in storage names, or None if a rollback has undone that checkpoint."""
        latest = self.storage.latest if self.storage else None
        return None if latest is None or self.voids(latest.round, latest.step) else latest

    def voids(self, round: int, step: int) -> bool:
        """Return whether a rollback of the job has made the state of this round and step invalid."""
        return any(rollback.covers(round, step) for rollback in self.undone)

    @property
    def all_shipped(self) -> bool:
        return not self._unshipped

    def outdated(self, round: int) -> bool:
        """Return whether the file LATEST may have changed in rounds in which this agent did not take part.

        LATEST names the job's newest checkpoint in storage. See decision "Agents that missed a round read LATEST
        again".
        """
        storage = self.storage
        if storage is None or storage.state == StorageHealth.UNKNOWN:
            return False
        return storage.round is None or storage.round < round - 1

    def new_round(self, round: int, undone: tuple[Undone, ...]) -> None:
        """Record that this agent is a member of a new round.

        From now on, the coordinator (the agent of rank 0) reports when the file LATEST in storage begins to name a
        different checkpoint.
        """
        self.undone = undone
        if self.storage is not None and not self.outdated(round):
            self.storage = dataclasses.replace(self.storage, round=round)
        self.parts = ()
        self._unshipped.clear()
        self._complete.clear()
        self._wanted.clear()

    def wanted(self, message: WantDurable) -> None:
        """Record that a worker has requested the upload of a shard.

        A new request replaces an earlier request for the same shard.
        """
        self._unshipped = {waiting for waiting in self._unshipped if waiting[1] != message.shard}
        self._unshipped.add((message.id, message.shard))
        self._wanted.add((message.id, message.shard))
        if message.complete:
            self._complete.add(message.id)

    def is_wanted(self, id: SnapshotId, shard: int) -> bool:
        return (id, shard) in self._wanted

    def is_coming(self, id: SnapshotId, shard: int) -> bool:
        """Return whether an upload of this shard has been requested or is finished."""
        arrived = any((part.id, part.shard) == (id, shard) for part in self.parts)
        return arrived or (id, shard) in self._unshipped

    def shipped(self, part: Part) -> None:
        part = dataclasses.replace(part, complete=part.id in self._complete)
        self.parts = (*(earlier_part for earlier_part in self.parts if earlier_part != part), part)
        self._unshipped.discard((part.id, part.shard))

    def moved(self, durable: Durable, round: int) -> None:
        """Record that the file LATEST in storage now names the checkpoint `durable`.

        The agent then no longer waits for uploads of this checkpoint's step or of earlier steps.
        """
        self.storage = Storage(StorageHealth.READY, durable, round=round)
        self.parts = tuple(part for part in self.parts if part.id.step > durable.step)
        self._unshipped = {waiting for waiting in self._unshipped if waiting[0].step > durable.step}

    def seen(self, storage: Storage, round: int) -> bool:
        """Record the state of storage after a check, and return whether the recorded state has changed.

        If the check has failed, this agent still assumes that the file LATEST in storage names the same checkpoint as
        at the last successful check.
        """
        if storage.state == StorageHealth.ERROR and storage.latest is None:
            previous = self.storage or storage
            storage = dataclasses.replace(storage, latest=previous.latest, round=previous.round)
        else:
            storage = dataclasses.replace(storage, round=round)
        news = self.storage is not None and storage != self.storage
        if news:
            self.storage = storage
        return news

    def has(self, uid: str, step: Optional[int], complete: bool) -> bool:
        """Return whether LATEST in storage names a checkpoint of the job `uid`, of step `step` or a later step.

        If `complete` is set, the checkpoint must also be that of the run's last step. Without storage, the result is
        always True.
        """
        latest = self.latest
        if self.storage is None:
            return True
        if latest is None or latest.uid != uid or (step is not None and latest.step < step):
            return False
        return latest.complete or not complete
