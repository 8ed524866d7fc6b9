"""Where there is no job: a state's snapshots in a folder, which outlast the process."""

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
from concertina_state.errors import BadInput
from concertina_state.format.shardfile import Header
from concertina_state.saved import LocalShard
from trainingjob import World

LOCK_SECONDS = 2.0
"""How long the end of a process that held the folder is waited for."""


class Folder:
    """In the agent's place: what is committed counts as safe at once. `<folder>/round-<r>/shard-<k>/slot-<n>`."""

    durable: Durable | None = None
    images: tuple[str, ...] = ()

    def __init__(self, folder: Path, world: World, same: Callable[[Any], Any]) -> None:
        """`same`: rank 0's value, on all ranks. Raises BadInput if another script saves to this folder."""
        self._folder, self._rank = folder, world.rank
        self._lock = None if world.rank else Lock(folder)
        if refused := same(self._lock and self._lock.refused):
            raise BadInput(refused)
        self._size = world.size
        self.round: int = same(1 + max(self._rounds(), default=0))
        self.history = JobHistory()
        self._said: list[Message] = []
        self._alone = False
        """Older rounds have been removed."""

    @property
    def snapshots(self) -> Path:
        return self._folder / f"round-{self.round}"

    def newest(self) -> InFolder | None:
        held: dict[SnapshotId, dict[int, Path]] = {}
        for path in self._folder.glob("round-*/shard-*/slot-?"):
            sidecar = read_sidecar(path)
            if sidecar is not None and sidecar.id.round < self.round:
                held.setdefault(sidecar.id, {})[sidecar.shard] = path
        whole = [id for id, shards in held.items() if len(shards) == id.shards]
        newest = max(whole, key=lambda id: (id.round, id.step), default=None)
        return InFolder(newest, held[newest]) if newest else None

    def send(self, message: Message) -> None:
        if isinstance(message, Committed):
            self._said.append(CopiedUpTo(message.id.step))

    def poll(self) -> list[Message]:
        said, self._said = self._said, []
        return said

    def passes(self) -> bool:
        return False

    def counts(self, samples: Callable[[], int]) -> None:
        """Nobody is told."""

    def restored(self, step: int, source: str) -> None:
        """Nobody is told."""

    def finished(self, step: int, snapshot_step: int | None, seconds: float) -> None:
        if snapshot_step is None or self._rank != 0 or self._alone:
            return
        self._alone = True
        for round in self._rounds():
            if round < self.round:
                shutil.rmtree(self._folder / f"round-{round}", ignore_errors=True)

    def _rounds(self) -> list[int]:
        found = (path.name.partition("-")[2] for path in self._folder.glob("round-*"))
        return [int(number) for number in found if number.isdecimal()]


class Lock:
    """A folder's lock, held by rank 0 as long as it lives: a killed process lets go of it.

    It is a POSIX record lock, so a forked process (a data loader's worker) does not keep it, and NFS knows it."""

    refused = ""
    """A sentence, if another process has it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "lock").open("a+b")
        until = time.monotonic() + LOCK_SECONDS
        while not self._taken():
            if time.monotonic() > until:
                self.refused = (
                    f"another process saves its state to {folder.resolve()}: give this script a folder of its own, "
                    "State(folder=...), or end the other one."
                )
                return
            time.sleep(0.05)

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True


class InFolder:
    def __init__(self, id: SnapshotId, paths: dict[int, Path]) -> None:
        self.id, self._paths = id, paths

    def header(self, shard: int) -> Header:
        return self.open(shard).header

    def open(self, shard: int) -> LocalShard:
        return LocalShard(self._paths[shard], self.id)
