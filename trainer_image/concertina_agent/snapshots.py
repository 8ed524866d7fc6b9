"""The shard files in this replica's volume: what is whole, where it is, and what goes.

`snapshots/round-<r>/...` is written by workers, `copies/round-<r>/shard-<k>/slot-<0|1>` by the copier, `fetched/` holds
what a starting worker asked for. Beside a file lies its mark, `<file>.json`: {"id", "shard", "size", "crc32",
"committed"}. A file without its mark is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Optional

from concertina_agent import protocol as p
from concertina_agent.changes import Changes
from concertina_agent.log import log
from concertina_agent.typed_json import ProtocolError, from_json

CHUNK = 1 << 18


class Damaged(Exception):
    """Bytes that are not what their mark or header says; a sentence."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One whole shard file."""

    path: Path
    id: p.SnapshotId
    number: int
    size: int
    checksum: int

    @property
    def header(self) -> p.ShardHeader:
        return p.ShardHeader(self.id, self.number, self.size, self.checksum)

    def tensors_header(self) -> str:
        """The safetensors header: JSON behind its length in 8 bytes."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > self.size:
                raise Damaged(f"{self.path} does not begin with a safetensors header")
            return file.read(length).decode()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its bytes; raises Damaged behind them where they are not those that were committed, and before where there
        are too few."""
        left, checksum = self.size, 0
        with self.path.open("rb", buffering=0) as file:
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise Damaged(f"{self.path} ends {left} bytes early")
                left -= len(data)
                checksum = zlib.crc32(data, checksum)
                yield data
                await asyncio.sleep(0)
        if checksum != self.checksum:
            raise Damaged(f"{self.path} has crc32 {checksum:08x} instead of {self.checksum:08x}")

    async def verify(self) -> None:
        """Raises Damaged where the bytes are not those that were committed. In a thread: a large one takes a while."""
        await asyncio.get_running_loop().run_in_executor(None, self._verify)

    def _verify(self) -> None:
        left, checksum, buffer = self.size, 0, memoryview(bytearray(4 * CHUNK))
        with self.path.open("rb", buffering=0) as file:
            while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
                checksum, left = zlib.crc32(buffer[:count], checksum), left - count
        if left:
            raise Damaged(f"{self.path} ends {left} bytes early")
        if checksum != self.checksum:
            raise Damaged(f"{self.path} has crc32 {checksum:08x} instead of {self.checksum:08x}")


class Snapshots:
    def __init__(self, volume: Path) -> None:
        self._own, self._copies, self._fetched = (volume / name for name in ("snapshots", "copies", "fetched"))
        self.news = Changes()
        """Told at each commit."""
        self._newest: dict[tuple[int, int], Shard] = {}
        """By round and shard: the newest one of our own workers."""

    def round_folder(self, round: int) -> Path:
        """Where the workers of a round put their shards."""
        return self._own / f"round-{round}"

    def scan(self) -> tuple[p.Held, ...]:
        """What the volume holds; what no round can use any more is swept away. Only while no worker lives."""
        self._sweep()
        held: dict[p.SnapshotId, set[int]] = {}
        for shard in self._all():
            held.setdefault(shard.id, set()).add(shard.number)
        return tuple(p.Held(id, tuple(sorted(numbers))) for id, numbers in held.items())

    def find(self, id: p.SnapshotId, number: int) -> Optional[Shard]:
        return next((shard for shard in self._all() if (shard.id, shard.number) == (id, number)), None)

    def committed(self, path: Path) -> None:
        """A worker has filled this slot."""
        shard = _marked(path.with_suffix(".json"))
        if shard is not None:
            self._newest[shard.id.round, shard.number] = shard
            self.news.tell()

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
            _mark(shard.path).unlink(missing_ok=True)
            shard.path.unlink(missing_ok=True)
        rounds = {id.round for id in unwanted}
        self._newest = {key: shard for key, shard in self._newest.items() if shard.id not in unwanted}
        for folder in (self._folder_of(root, r) for root in (self._own, self._copies) for r in rounds):
            if not any(folder.rglob("*.json")):
                shutil.rmtree(folder, ignore_errors=True)
        self.forget_fetched()

    def discard(self, shard: Shard) -> None:
        """It is damaged: no round is to count on it again."""
        log("snapshot_damaged", path=str(shard.path), round=shard.id.round, step=shard.id.step, shard=shard.number)
        _mark(shard.path).unlink(missing_ok=True)
        self._newest = {key: known for key, known in self._newest.items() if known != shard}

    def forget_fetched(self) -> None:
        shutil.rmtree(self._fetched, ignore_errors=True)

    def copy_slot(self, id: p.SnapshotId, number: int) -> Path:
        """Where the next copy of this shard goes: not over the newest one."""
        folder = self._folder_of(self._copies, id.round) / f"shard-{number}"
        steps = dict.fromkeys((folder / "slot-0", folder / "slot-1"), -1)
        for path in steps:
            if (shard := _marked(_mark(path))) is not None:
                steps[path] = shard.id.step
        return min(steps, key=steps.__getitem__)

    def fetched_path(self, id: p.SnapshotId, number: int) -> Path:
        return self._fetched / f"round-{id.round}-step-{id.step}" / f"shard-{number}"

    def fetched(self, id: p.SnapshotId, number: int) -> Optional[Shard]:
        shard = _marked(_mark(self.fetched_path(id, number)))
        return shard if shard is not None and shard.id == id else None

    def _sweep(self) -> None:
        """Remove folders without one whole shard, and parts that nobody ships any more."""
        for name in [*self._own.glob("round-*/**/shipping-*")]:
            name.unlink(missing_ok=True)
        for folder in [*self._own.glob("round-*"), *self._copies.glob("round-*")]:
            if not any(folder.rglob("*.json")):
                shutil.rmtree(folder, ignore_errors=True)

    def _all(self) -> Iterator[Shard]:
        for root in (self._own, self._copies):
            for mark in sorted(root.glob("round-*/**/*.json")):
                if (shard := _marked(mark)) is not None:
                    yield shard

    def _folder_of(self, root: Path, round: int) -> Path:
        return root / f"round-{round}"


class Writing:
    """A shard file being filled; it counts once `commit` has returned."""

    def __init__(self, path: Path, header: p.ShardHeader) -> None:
        """Raises OSError where the volume has no room."""
        self._path, self._header = path, header
        self._at = self._checksum = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        _mark(path).unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(self._fd, header.size)
            if header.size:
                os.posix_fallocate(self._fd, 0, header.size)
        except OSError:
            os.close(self._fd)
            raise

    @property
    def left(self) -> int:
        return self._header.size - self._at

    def write(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)
        self._at += os.pwrite(self._fd, data, self._at)

    def commit(self) -> Shard:
        """Raises Damaged where the bytes are not those that the header announced."""
        header = self._header
        if self.left or self._checksum != header.checksum:
            raise Damaged(f"shard {header.shard} of step {header.id.step} did not arrive whole")
        mark = {
            "id": dataclasses.asdict(header.id), "shard": header.shard, "size": header.size,
            "crc32": header.checksum, "committed": True,
        }  # fmt: skip
        draft = self._path.with_suffix(".json.new")
        draft.write_text(json.dumps(mark))
        draft.replace(_mark(self._path))
        return Shard(self._path, header.id, header.shard, header.size, header.checksum)

    def close(self) -> None:
        os.close(self._fd)


def _mark(path: Path) -> Path:
    return path.with_suffix(".json")


def _marked(mark: Path) -> Optional[Shard]:
    """The shard that a mark speaks of, if its file is there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ProtocolError):
        facts = json.loads(mark.read_text())
        files = (mark.with_suffix(""), mark.with_suffix(".safetensors"))
        path = next((file for file in files if file.exists()), None)
        if path is not None and facts["committed"] and path.stat().st_size == facts["size"]:
            id = from_json(p.SnapshotId, facts["id"])
            return Shard(path, id, int(facts["shard"]), int(facts["size"]), int(facts["crc32"]))
    return None
