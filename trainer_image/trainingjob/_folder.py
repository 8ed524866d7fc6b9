"""Snapshots in a folder on disk, for a script that runs outside of a job.

The folder remains when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from concertina_protocol import Durable, JobHistory, SnapshotId
from concertina_protocol.sidecar import read_sidecar
from concertina_protocol.worker_channel import Committed, CopiedUpTo, Message
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Header
from concertina_state.saved import LocalShard
from trainingjob._world import World

LOCK_SECONDS = 2.0
"""Seconds to wait for another process to release the folder's lock."""


class Folder:
    """Replacement for the agent outside of a job, which keeps snapshots in a folder.

    A committed snapshot counts as safe at once, because no other replica copies it. The file of a shard is
    `<folder>/round-<r>/shard-<k>/slot-<n>`.
    """

    durable: Durable | None = None
    images: tuple[str, ...] = ()

    def __init__(self, folder: Path, world: World, same: Callable[[Any], Any]) -> None:
        """Open a folder for snapshots, and lock the folder so that no other script saves to it.

        Args:
            folder: The folder. It is created if it does not exist.
            world: Rank of this process, and number of ranks.
            same: Function that all ranks call with a value. The function returns the value of rank 0 on all ranks.

        Raises:
            InvalidInput: Another script saves to this folder.
        """
        self._folder, self._rank = folder, world.rank
        self._lock = None if world.rank else Lock(folder)
        if refusal := same(self._lock and self._lock.refusal):
            raise InvalidInput(refusal)
        self._size = world.size
        self.round: int = same(1 + max(self._rounds(), default=0))
        self.history = JobHistory()
        self._messages: list[Message] = []
        self._removed_older_rounds = False

    @property
    def snapshots(self) -> Path:
        """Folder for the snapshots of this round."""
        return self._folder / f"round-{self.round}"

    def newest(self) -> StateInFolder | None:
        """Return the newest complete snapshot that earlier runs have saved in the folder, or None if there is none."""
        paths_by_id: dict[SnapshotId, dict[int, Path]] = {}
        for path in self._folder.glob("round-*/shard-*/slot-?"):
            sidecar = read_sidecar(path)
            if sidecar is not None and sidecar.id.round < self.round:
                paths_by_id.setdefault(sidecar.id, {})[sidecar.shard] = path
        complete = [id for id, paths in paths_by_id.items() if len(paths) == id.shards]
        newest = max(complete, key=lambda id: (id.round, id.step), default=None)
        return StateInFolder(newest, paths_by_id[newest]) if newest else None

    def send(self, message: Message) -> None:
        """Act on a message that a `State` would otherwise send to the agent.

        A committed snapshot is answered as if another replica had copied it.
        """
        if isinstance(message, Committed):
            self._messages.append(CopiedUpTo(message.id.step))

    def poll(self) -> list[Message]:
        """Return the answers to messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def must_stop(self) -> bool:
        """Return False, because outside of a job nothing stops the workers."""
        return False

    def count_samples_by(self, samples: Callable[[], int]) -> None:
        """Do nothing, because there is no job to report to."""

    def report_restored(self, step: int, source: str) -> None:
        """Do nothing, because there is no job to report to."""

    def report_commit(self, step: int, snapshot_step: int | None, seconds: float) -> None:
        """Delete the snapshots of earlier rounds once this round has a complete snapshot."""
        if snapshot_step is None or self._rank != 0 or self._removed_older_rounds:
            return
        self._removed_older_rounds = True
        for round in self._rounds():
            if round < self.round:
                shutil.rmtree(self._folder / f"round-{round}", ignore_errors=True)

    def _rounds(self) -> list[int]:
        """Return the numbers of the rounds that have a folder."""
        numbers = (path.name.partition("-")[2] for path in self._folder.glob("round-*"))
        return [int(number) for number in numbers if number.isdecimal()]


class Lock:
    """Lock on a folder, which rank 0 holds until its process ends, also when the process is killed.

    The lock is a POSIX record lock. A forked process (a data loader's worker) therefore does not inherit the lock, and
    NFS supports it.
    """

    refusal = ""
    """A sentence that says why the lock could not be taken; empty if it was."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "lock").open("a+b")
        deadline = time.monotonic() + LOCK_SECONDS
        while not self._try():
            if time.monotonic() > deadline:
                self.refusal = (
                    f"another process saves its state to {folder.resolve()}: give this script its own "
                    "folder with State(folder=...), or end the other process."
                )
                return
            time.sleep(0.05)

    def _try(self) -> bool:
        """Take the lock if no other process has it, and return whether this process has the lock now.

        Raises:
            OSError: The file system has no locks.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True


class StateInFolder:
    """Complete snapshot in a folder, from which a `State` can be restored (see `concertina_state.saved.SavedState`)."""

    def __init__(self, id: SnapshotId, paths: dict[int, Path]) -> None:
        self.id, self._paths = id, paths

    def header(self, shard: int) -> Header:
        return self.open(shard).header

    def open(self, shard: int) -> LocalShard:
        return LocalShard(self._paths[shard], self.id)
