"""The shard files in this replica's volume: what is whole, where it is, and what goes.

`snapshots/round-<r>/...` is written by workers, `copies/round-<r>/shard-<k>/slot-<0|1>` by the copier, `fetched/` holds
what a starting worker asked for, `freed/` what has gone: a thread gives its memory back, 0.15 s for each gigabyte,
whoever has it open still (decision "What is freed is emptied").
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
    def __init__(self, volume: Path) -> None:
        self._own, self._copies, self._fetched = (volume / name for name in ("snapshots", "copies", "fetched"))
        self._freed = volume / "freed"
        self._freeing = concurrent.futures.ThreadPoolExecutor(1, "freeing")
        self.news = Notifier()
        """Told at each commit."""
        self._newest: dict[tuple[int, int], Shard] = {}
        """By round and shard: the newest one of our own workers."""
        for left in self._freed.glob("*"):
            self._freeing.submit(_empty, left)

    def round_folder(self, round: int) -> Path:
        """Where the workers of a round put their shards."""
        return self._own / f"round-{round}"

    def scan(self) -> tuple[p.HeldSnapshot, ...]:
        """What the volume holds; what no round can use any more is swept away. Only while no worker lives."""
        self._sweep()
        held: dict[p.SnapshotId, set[int]] = {}
        for shard in self._all():
            held.setdefault(shard.id, set()).add(shard.number)
        return tuple(p.HeldSnapshot(id, tuple(sorted(numbers))) for id, numbers in held.items())

    def find(self, id: p.SnapshotId, number: int) -> Optional[Shard]:
        return next((shard for shard in self._all() if (shard.id, shard.number) == (id, number)), None)

    def committed(self, path: Path) -> None:
        """A worker has filled this slot."""
        shard = committed_shard(path)
        if shard is not None:
            self._newest[shard.id.round, shard.number] = shard
            self.news.notify()

    def link_for_shipping(self, path: Path, step: int) -> Path:
        """A second name for a committed slot, which goes when it is in storage."""
        name = path.parent / f"shipping-{step}"
        name.unlink(missing_ok=True)
        os.link(path, name)
        return name

    def newest(self, round: int, number: int, after_step: int) -> Optional[Shard]:
        """The newest one committed by a worker of ours, if it is newer than that step."""
        shard = self._newest.get((round, number))
        return shard if shard is not None and shard.id.step > after_step else None

    def drop(self, ids: Iterable[p.SnapshotId]) -> None:
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
        """Its bytes are not those that were committed: no round is to count on it again (decision "A damaged snapshot
        is forgotten by who holds it"). Who writes takes the sidecar away first: what has another by now, or none yet,
        is a newer snapshot in the same slot, and stays (decision "A drain may write over a running copy")."""
        if committed_shard(shard.path) == shard:
            log_event(
                "snapshot_damaged", path=str(shard.path), round=shard.id.round, step=shard.id.step, shard=shard.number
            )
            remove_sidecar(shard.path)
        self._newest = {key: known for key, known in self._newest.items() if known != shard}

    def forget_fetched(self) -> None:
        self.free(self._fetched)

    def free(self, path: Path) -> None:
        """Out of the way at once; its memory comes back a little later."""
        if path.exists():
            self._freed.mkdir(exist_ok=True)
            aside = Path(tempfile.mkdtemp(dir=self._freed))
            with contextlib.suppress(FileNotFoundError):  # the uploader takes away what it has shipped
                path.rename(aside / path.name)
            self._freeing.submit(_empty, aside)

    def copy_slot(self, id: p.SnapshotId, number: int) -> Path:
        """Where the next copy of this shard goes: not over the newest one."""
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
        """What no sidecar speaks of takes memory for nothing: slots being written, parts that nobody ships."""
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
            for found in sorted(root.glob("round-*/**/*.json")):
                if (shard := committed_shard(found.with_suffix(""))) is not None:
                    yield shard

    def _folder_of(self, root: Path, round: int) -> Path:
        return root / f"round-{round}"


def _empty(folder: Path) -> None:
    """And away with it. What has another name stays as it is under that one."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            path.unlink()
            if os.fstat(file.fileno()).st_nlink == 0:
                file.truncate(0)
    shutil.rmtree(folder, ignore_errors=True)
