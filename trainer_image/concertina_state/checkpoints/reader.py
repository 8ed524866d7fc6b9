"""Reading checkpoints from durable storage: every byte is checked against the manifest before it is used."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from concertina_protocol import SnapshotId
from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.sidecar import Damaged
from concertina_state.checkpoints import manifest as manifests
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import BLOCK, Manifest, ShardFile, StoredSidecar
from concertina_state.errors import BadInput
from concertina_state.format.shardfile import Header, parse_header
from concertina_state.objects.prefix import Missing, NoFolder, ObjectPrefix, StorageError
from concertina_state.objects.retry import GRACE, tries

Span = tuple[int, int]
"""The bytes [begin, end) of a file."""


class StoredShard:
    """One shard, read by byte ranges."""

    batch_bytes = 16 * BLOCK
    """So many are best asked for at once: as many requests as go at a time, and whole blocks."""

    def __init__(self, folder: ObjectPrefix, file: ShardFile) -> None:
        self._folder, self.file = folder, file
        self.uri = f"{folder.uri}/{file.key}"

    @cached_property
    def header(self) -> Header:
        """Raises BadInput or StorageError."""
        size = self.file.header_size
        data = self._checked((0, size), lambda data: zlib.crc32(data) == self.file.header_crc32)
        try:
            return parse_header(bytes(data[8:]))
        except Damaged as error:
            raise BadInput(f"{self.uri} can't be used: {error}.") from error

    def read(self, ranges: Sequence[Span]) -> list[memoryview]:
        """The bytes of each range; whole blocks are read, and checked. Raises BadInput or StorageError."""
        spans = _merged(sorted(_blocks(span, self.file.size) for span in ranges))
        held = [(span[0], self._checked(span, functools.partial(self._is_whole, span[0]))) for span in spans]
        return [_cut(held, begin, end) for begin, end in ranges]

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each with the file's bytes from that offset on. Raises BadInput or StorageError."""
        copy_ranges(self.read, parts)

    def blocks(self) -> Iterator[memoryview]:
        """The whole file in order, some blocks at a time."""
        step = 8 * BLOCK
        for begin in range(0, self.file.size, step):
            yield self.read([(begin, min(begin + step, self.file.size))])[0]

    def _is_whole(self, begin: int, data: memoryview) -> bool:
        first = begin // BLOCK
        value = self._ends[first - 1] if first else 0
        for number, at in enumerate(range(0, len(data), BLOCK), first):
            value = zlib.crc32(data[at : at + BLOCK], value)
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
            raise BadInput(f"{self._folder.uri}/{key} is missing or damaged: use an older checkpoint.") from error
        if sidecar.part != self.file or len(sidecar.blocks) != -(-self.file.size // BLOCK):
            raise BadInput(f"{self._folder.uri}/{key} does not fit the manifest: use an older checkpoint.")
        return sidecar.blocks

    def _checked(self, span: Span, whole: Callable[[memoryview], bool]) -> memoryview:
        problem = ""
        for _ in tries():
            try:
                data = self._folder.read_range(self.file.key, *span)
                if len(data) == span[1] - span[0] and whole(data):
                    return data
                problem = "do not have the checksum of the manifest"
            except Missing:
                problem = "are not there"
        raise BadInput(
            f"{self.uri} is damaged: its bytes {span[0]} to {span[1]} {problem}, read {len(GRACE) + 1} times. Use an "
            "older checkpoint: `concertina checkpoint list` shows which there are."
        )


class StoredCheckpoint:
    """One finished checkpoint, by its own folder's URI. Raises StorageError or BadInput."""

    def __init__(self, uri: str) -> None:
        try:
            self.folder = ObjectPrefix(uri)
        except NoFolder as error:
            raise _gone(uri) from error
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


def copy_ranges(read: Callable[[Sequence[Span]], list[memoryview]], parts: Sequence[tuple[int, memoryview]]) -> None:
    """Fill each part with what `read` has from that offset on."""
    found = read([(begin, begin + len(target)) for begin, target in parts])
    for (_, target), data in zip(parts, found, strict=True):
        target[:] = data


def _gone(uri: str) -> StorageError:
    return StorageError(
        f"{uri} has no {manifests.NAME}: it was never finished, or has been deleted to keep the newer ones. "
        "`concertina checkpoint list` shows which there are; try again with one of those."
    )


def resolve(uri: str) -> str:
    """The folder of one checkpoint: `uri` itself, or what LATEST names in a run's folder. Raises BadInput where there
    is neither, or StorageError."""
    folder = ObjectPrefix(uri)
    if folder.get(manifests.NAME) is not None:
        return folder.uri
    latest = read_latest(folder)
    if latest is None:
        raise BadInput(
            f"{uri} is no checkpoint (there is no {manifests.NAME}) and no run's folder (no LATEST, or one that names "
            "nothing: training went back, and no checkpoint from before that is left)."
        )
    return f"{folder.uri}/{manifests.CheckpointKey(latest.uid, latest.round, latest.step).folder}"


def _blocks(span: Span, size: int) -> Span:
    return span[0] // BLOCK * BLOCK, min(size, -(-span[1] // BLOCK) * BLOCK)


def _merged(spans: list[Span]) -> Iterator[Span]:
    """Of sorted spans, those that touch as one."""
    current: Span | None = None
    for begin, end in spans:
        if current is not None and begin <= current[1]:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current


def _cut(held: list[tuple[int, memoryview]], begin: int, end: int) -> memoryview:
    for at, data in held:
        if at <= begin and end <= at + len(data):
            return data[begin - at : end - at]
    raise AssertionError((begin, end))
