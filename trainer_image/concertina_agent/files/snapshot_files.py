"""Shard files in this replica's volume: where they are, which are complete, and how they are deleted.

Workers write into `snapshots/round-<r>/...`. Copies of another replica's shards are in
`copies/round-<r>/shard-<k>/slot-<0|1>`. Shards that a starting worker requested are in `fetched/`. Deleted files are
moved to `freed/`, where a thread truncates them. Truncation frees a file's memory even if a process has the file open,
and takes 0.15 s per gigabyte (decision "Freed shards are truncated").
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Optional

import concertina_protocol as p
from concertina_agent.files.shards import Shard, committed_shard
from concertina_agent.runtime.notifier import Notifier
from concertina_protocol.log import log_event
from concertina_protocol.sidecar import COPY_SLOTS, remove_sidecar


class SnapshotFiles:
    """Shard files in this replica's volume."""

    def __init__(self, volume: Path) -> None:
        self._own, self._copies, self._fetched = (volume / name for name in ("snapshots", "copies", "fetched"))
        self._freed = volume / "freed"
        self._freeing = concurrent.futures.ThreadPoolExecutor(1, "freeing")
        self.news = Notifier()
        """Notifier of new shards that this agent's workers have committed."""
        self._newest: dict[tuple[int, int], Shard] = {}
        """Newest committed shard of this agent's workers, by round and shard number."""
        for leftover in self._freed.glob("*"):
            self._freeing.submit(_empty, leftover)

    def round_folder(self, round: int) -> Path:
        """Return the folder into which the workers of a round write their shards."""
        return self._own / f"round-{round}"

    def scan(self) -> tuple[p.HeldSnapshot, ...]:
        """Delete files in the volume that no round can use, and return the snapshots that remain.

        Call this method only while no worker is running.
        """
        self._sweep()
        shard_numbers: dict[p.SnapshotId, set[int]] = {}
        for shard in self._all():
            shard_numbers.setdefault(shard.id, set()).add(shard.number)
        return tuple(p.HeldSnapshot(id, tuple(sorted(numbers))) for id, numbers in shard_numbers.items())

    def find(self, id: p.SnapshotId, number: int) -> Optional[Shard]:
        """Return a shard of a snapshot, or None if the volume does not contain it."""
        return next((shard for shard in self._all() if (shard.id, shard.number) == (id, number)), None)

    def committed(self, path: Path) -> None:
        """Record that a worker has completely written its shard into the file at `path`."""
        shard = committed_shard(path)
        if shard is not None:
            self._newest[shard.id.round, shard.number] = shard
            self.news.notify()

    def link_for_shipping(self, path: Path, step: int) -> Path:
        """Create a hard link to the shard file at `path` for the uploader, and return the link's path.

        The link keeps the bytes if the file at `path` is deleted before the upload ends. The uploader removes the link
        when the shard is in storage.
        """
        name = path.parent / f"shipping-{step}"
        name.unlink(missing_ok=True)
        os.link(path, name)
        return name

    def newest(self, round: int, number: int, after_step: int) -> Optional[Shard]:
        """Return the newest shard `number` that a worker has committed in `round` after `after_step`, or None."""
        shard = self._newest.get((round, number))
        return shard if shard is not None and shard.id.step > after_step else None

    def drop(self, ids: Iterable[p.SnapshotId]) -> None:
        """Delete the snapshots `ids`, and all shards that workers have fetched from other replicas."""
        unwanted = set(ids)
        for shard in [shard for shard in self._all() if shard.id in unwanted]:
            remove_sidecar(shard.path)
            self.free(shard.path)
        rounds = {id.round for id in unwanted}
        self._newest = {key: shard for key, shard in self._newest.items() if shard.id not in unwanted}
        for folder in (self._folder_of(root, r) for root in (self._own, self._copies) for r in rounds):
            self._free_without_sidecars(folder)
        self.forget_fetched()

    def discard(self, shard: Shard) -> None:
        """Delete a shard whose bytes are damaged, so that no later round uses it.

        The file is not deleted if its sidecar has been removed or replaced meanwhile, because a worker has then begun
        to write a newer snapshot into the file. See decisions "The holder of a damaged snapshot removes it" and "A
        drain may write over a running copy".

        In a drain, all ranks stop after the same step.
        """
        if committed_shard(shard.path) == shard:
            log_event(
                "snapshot_damaged", path=str(shard.path), round=shard.id.round, step=shard.id.step, shard=shard.number
            )
            remove_sidecar(shard.path)
        self._newest = {key: newest for key, newest in self._newest.items() if newest != shard}

    def forget_fetched(self) -> None:
        self.free(self._fetched)

    def free(self, path: Path) -> None:
        """Delete a file or folder. The path is free at once, and the memory is freed a little later."""
        if path.exists():
            self._freed.mkdir(exist_ok=True)
            aside = Path(tempfile.mkdtemp(dir=self._freed))
            with contextlib.suppress(FileNotFoundError):  # the uploader removes files after their upload
                path.rename(aside / path.name)
            self._freeing.submit(_empty, aside)

    def copy_slot(self, id: p.SnapshotId, number: int) -> Path:
        """Return the path at which to store the next copy of a shard of another replica.

        There are two such paths for each shard, so the newest copy is not overwritten.
        """
        folder = self._folder_of(self._copies, id.round) / f"shard-{number}"
        steps = dict.fromkeys((folder / f"slot-{index}" for index in range(COPY_SLOTS)), -1)
        for path in steps:
            if (shard := committed_shard(path)) is not None:
                steps[path] = shard.id.step
        return min(steps, key=steps.__getitem__)

    def fetched_path(self, id: p.SnapshotId, number: int) -> Path:
        return self._fetched / f"round-{id.round}-step-{id.step}" / f"shard-{number}"

    def fetched(self, id: p.SnapshotId, number: int) -> Optional[Shard]:
        shard = committed_shard(self.fetched_path(id, number))
        return shard if shard is not None and shard.id == id else None

    def _sweep(self) -> None:
        """Delete each file that has no sidecar, to free its memory.

        Such a file is a shard that was not completely written, or a hard link for an upload that did not finish.
        """
        whole = {shard.path for shard in self._all()}
        for root in (self._own, self._copies):
            for folder in [*root.glob("round-*")]:
                self._free_without_sidecars(folder)
            for path in [path for path in root.glob("round-*/**/*") if path.is_file() and path.suffix != ".json"]:
                if path not in whole:
                    self.free(path)

    def _free_without_sidecars(self, folder: Path) -> None:
        if not any(folder.rglob("*.json")):
            self.free(folder)

    def _all(self) -> Iterator[Shard]:
        for root in (self._own, self._copies):
            for sidecar in sorted(root.glob("round-*/**/*.json")):
                if (shard := committed_shard(sidecar.with_suffix(""))) is not None:
                    yield shard

    def _folder_of(self, root: Path, round: int) -> Path:
        return root / f"round-{round}"


def _empty(folder: Path) -> None:
    """Delete a folder and free the memory of its files.

    A file that has a second hard link elsewhere keeps its contents.
    """
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            path.unlink()
            if os.fstat(file.fileno()).st_nlink == 0:
                file.truncate(0)
    shutil.rmtree(folder, ignore_errors=True)
