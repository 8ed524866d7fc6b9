"""Reading checkpoints from durable storage: every byte is checked against the manifest before it is used."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from concertina_protocol import SnapshotId
from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.sidecar import Damaged
from concertina_state.checkpoints import manifest as manifests
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import BLOCK, Manifest, ShardFile, StoredSidecar
from concertina_state.checkpoints.retention import lease
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.format.shardfile import Header, parse_header
from concertina_state.objects.prefix import Missing, NoFolder, ObjectPrefix, StorageError, window
from concertina_state.objects.retry import GRACE, tries

Span = tuple[int, int]
"""The bytes [begin, end) of a file."""


class StoredShard:
    """One shard, read by byte ranges."""

    batch_bytes = 16 * BLOCK
    """So many are best asked for at once: some requests of a cloud's store, and whole blocks."""

    def __init__(self, folder: ObjectPrefix, file: ShardFile) -> None:
        self._folder, self.file = folder, file
        self.uri = f"{folder.uri}/{file.key}"

    @cached_property
    def header(self) -> Header:
        """Raises InvalidInput or StorageError."""
        data = memoryview(bytearray(self.file.header_size))
        self._read_checked(0, [data], lambda views: _crc32(views, 0) == self.file.header_crc32)
        try:
            return parse_header(bytes(data[8:]))
        except Damaged as error:
            raise InvalidInput(f"{self.uri} can't be used: {error}.") from error

    def read(self, ranges: Sequence[Span]) -> list[memoryview]:
        """The bytes of each range. Raises InvalidInput or StorageError."""
        held = [memoryview(bytearray(end - begin)) for begin, end in ranges]
        self.read_into([(begin, target) for (begin, _), target in zip(ranges, held, strict=True)])
        return held

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each with the file's bytes from that offset on; whole blocks are read, straight into place, and checked
        there. Raises InvalidInput or StorageError, and what is in place is good for nothing then."""
        for run in _runs(parts):
            begin = run[0][0] // BLOCK * BLOCK
            end = min(self.file.size, -(-(run[-1][0] + len(run[-1][1])) // BLOCK) * BLOCK)
            self._read_checked(begin, _covering(run, begin, end), functools.partial(self._is_whole, begin))

    def blocks(self) -> Iterator[memoryview]:
        """The whole file in order, some blocks at a time."""
        step = 8 * BLOCK
        for begin in range(0, self.file.size, step):
            yield self.read([(begin, min(begin + step, self.file.size))])[0]

    def _is_whole(self, begin: int, views: Sequence[memoryview]) -> bool:
        first, size = begin // BLOCK, sum(map(len, views))
        value = self._ends[first - 1] if first else 0
        for number, at in enumerate(range(0, size, BLOCK), first):
            value = _crc32(window(views, at, at + BLOCK), value)
            if value != self._ends[number]:
                return False
        return True

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Checksums up to the end of each block."""
        if self.file.size <= BLOCK:
            return (self.file.crc32,)
        key = self.file.key.removesuffix(".safetensors") + ".json"
        text = self._folder.get(key)
        try:
            sidecar = parse_json(StoredSidecar, text or b"null")
        except ValueError as error:
            if text is None:
                self._check_not_deleted()
            raise DamagedInput(
                f"{self._folder.uri}/{key} is missing or damaged: use an older checkpoint.", self._folder.uri
            ) from error
        if sidecar.part != self.file or len(sidecar.blocks) != -(-self.file.size // BLOCK):
            raise DamagedInput(
                f"{self._folder.uri}/{key} does not fit the manifest: use an older checkpoint.", self._folder.uri
            )
        return sidecar.blocks

    def _read_checked(
        self, begin: int, views: Sequence[memoryview], whole: Callable[[Sequence[memoryview]], bool]
    ) -> None:
        missing = False
        for _ in tries():
            try:
                self._folder.read_into(self.file.key, begin, views)
                if whole(views):
                    return
                missing = False
            except Missing:
                missing = True
        if missing:
            self._check_not_deleted()
        problem = "are not there" if missing else "do not have the checksum of the manifest"
        raise DamagedInput(
            f"{self.uri} is damaged: its bytes {begin} to {begin + sum(map(len, views))} {problem}, read "
            f"{len(GRACE) + 1} times. Use an older checkpoint: `concertina checkpoint list` shows which there are.",
            self._folder.uri,
        )

    def _check_not_deleted(self) -> None:
        """A sweep takes the manifest first. Raises StorageError: another checkpoint is there to be read."""
        if self._folder.get(manifests.NAME) is None:
            raise _gone(self._folder.uri)


class StoredCheckpoint:
    """One finished checkpoint, by its own folder's URI. Raises StorageError or InvalidInput."""

    def __init__(self, uri: str) -> None:
        self.folder = _folder(uri)
        self.uri = self.folder.uri
        text = self.folder.get(manifests.NAME)
        if text is None:
            raise _gone(uri)
        self.manifest: Manifest = manifests.parse(text, self.uri)

    @property
    def id(self) -> SnapshotId:
        return self.manifest.id

    def header(self, shard: int) -> Header:
        return self.open(shard).header

    def open(self, shard: int) -> StoredShard:
        return self.shards[shard]

    @cached_property
    def shards(self) -> list[StoredShard]:
        """By number of the shard."""
        return [StoredShard(self.folder, file) for file in self.manifest.parts]


@contextlib.contextmanager
def opened(uri: str) -> Iterator[StoredCheckpoint]:
    """As StoredCheckpoint, and it stays until the block is left."""
    with lease(_folder(uri)):
        yield StoredCheckpoint(uri)


def _folder(uri: str) -> ObjectPrefix:
    try:
        return ObjectPrefix(uri)
    except NoFolder as error:
        raise _gone(uri) from error


def _gone(uri: str) -> StorageError:
    return StorageError(
        f"{uri} has no {manifests.NAME}: it was never finished, or has been deleted to keep the newer ones. "
        "`concertina checkpoint list` shows which there are; try again with one of those."
    )


def resolve(uri: str) -> str:
    """The folder of one checkpoint: `uri` itself, or what LATEST names in a run's folder. Raises InvalidInput where
    there is neither, or StorageError."""
    folder = ObjectPrefix(uri)
    if folder.get(manifests.NAME) is not None:
        return folder.uri
    latest = read_latest(folder)
    if latest is None:
        raise InvalidInput(
            f"{uri} is no checkpoint (there is no {manifests.NAME}) and no run's folder (no LATEST, or one that names "
            "nothing: training went back, and no checkpoint from before that is left)."
        )
    return f"{folder.uri}/{manifests.CheckpointKey(latest.uid, latest.round, latest.step).folder}"


def _crc32(views: Iterable[memoryview], value: int) -> int:
    for view in views:
        value = zlib.crc32(view, value)
    return value


def _runs(parts: Sequence[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """In the file's order, those that share a block or stand in neighbouring ones; of two that want the same bytes each
    is in a run of its own."""
    run: list[tuple[int, memoryview]] = []
    end = 0
    for begin, target in sorted((part for part in parts if part[1]), key=lambda part: part[0]):
        if run and not end <= begin <= -(-end // BLOCK) * BLOCK:
            yield run
            run = []
        run.append((begin, target))
        end = begin + len(target)
    if run:
        yield run


def _covering(run: Sequence[tuple[int, memoryview]], begin: int, end: int) -> list[memoryview]:
    """Places for all bytes [begin, end) of the file: those of the run, and others for what nobody wants."""
    views: list[memoryview] = []
    for at, target in run:
        views += [memoryview(bytearray(at - begin)), target]
        begin = at + len(target)
    return [*views, memoryview(bytearray(max(0, end - begin)))]
