"""Reading of checkpoints from durable storage. Every byte is verified against the manifest before it is used."""

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
from concertina_state.checkpoints.best import best_uri, run_of_best
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import BLOCK, Manifest, ShardFile, StoredSidecar
from concertina_state.checkpoints.retention import lease
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.format.shardfile import Header, parse_header
from concertina_state.objects.prefix import Missing, NoFolder, ObjectPrefix, StorageError, window
from concertina_state.objects.retry import GRACE, tries

Span = tuple[int, int]
"""Range of bytes of a file: offset of the first byte, and offset after the last byte."""


class StoredShard:
    """Shard of a checkpoint, from which arbitrary byte ranges can be read."""

    batch_bytes = 16 * BLOCK
    """Preferred number of bytes per request.

    The number is a multiple of BLOCK, and large enough for several parallel requests to the store.
    """

    def __init__(self, folder: ObjectPrefix, file: ShardFile) -> None:
        self._folder, self.file = folder, file
        self.uri = f"{folder.uri}/{file.key}"

    @cached_property
    def header(self) -> Header:
        """Header of the shard.

        Raises:
            InvalidInput: When the header is damaged.
            StorageError: When the header can't be read.
        """
        data = memoryview(bytearray(self.file.header_size))
        self._read_checked(0, [data], lambda views: _crc32(views, 0) == self.file.header_crc32)
        try:
            return parse_header(bytes(data[8:]))
        except Damaged as error:
            raise InvalidInput(f"{self.uri} can't be used: {error}.") from error

    def read(self, ranges: Sequence[Span]) -> list[memoryview]:
        """Return the bytes of each range.

        Raises:
            InvalidInput: When the file is damaged.
            StorageError: When the file can't be read.
        """
        buffers = [memoryview(bytearray(end - begin)) for begin, end in ranges]
        self.read_into([(begin, target) for (begin, _), target in zip(ranges, buffers)])
        return buffers

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memoryview with bytes of the file, beginning at the memoryview's offset.

        Whole blocks are read straight into the memoryviews and verified there. After an error, the contents of the
        memoryviews are undefined.

        Raises:
            InvalidInput: When the file is damaged.
            StorageError: When the file can't be read.
        """
        for run in _runs(parts):
            begin = run[0][0] // BLOCK * BLOCK
            end = min(self.file.size, -(-(run[-1][0] + len(run[-1][1])) // BLOCK) * BLOCK)
            self._read_checked(begin, _covering(run, begin, end), functools.partial(self._is_whole, begin))

    def blocks(self) -> Iterator[memoryview]:
        """Yield the contents of the whole file in order, several blocks at a time."""
        step = 8 * BLOCK
        for begin in range(0, self.file.size, step):
            yield self.read([(begin, min(begin + step, self.file.size))])[0]

    def _is_whole(self, begin: int, views: Sequence[memoryview]) -> bool:
        first, size = begin // BLOCK, sum(map(len, views))
        value = self._ends[first - 1] if first else 0
        for number, offset in enumerate(range(0, size, BLOCK), first):
            value = _crc32(window(views, offset, offset + BLOCK), value)
            if value != self._ends[number]:
                return False
        return True

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Running checksums of the shard's file: the crc32 of the file up to the end of each block.

        Raises:
            DamagedInput: When the sidecar is damaged, or does not match the manifest.
        """
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
        problem = "are missing" if missing else "differ from the manifest's checksum"
        raise DamagedInput(
            f"{self.uri} is damaged: its bytes {begin} to {begin + sum(map(len, views))} {problem}, read "
            f"{len(GRACE) + 1} times. Use an older checkpoint: `concertina checkpoint list` shows the "
            "others.",
            self._folder.uri,
        )

    def _check_not_deleted(self) -> None:
        """Check that the checkpoint has not been deleted. Deletion begins with the manifest.

        Raises:
            StorageError: When the checkpoint was deleted. The message advises to use another checkpoint.
        """
        if self._folder.get(manifests.NAME) is None:
            raise _gone(self._folder.uri)


class StoredCheckpoint:
    """Finished checkpoint, given the URI of its own folder. Methods raise StorageError or InvalidInput."""

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
        """Shards in the order of their numbers."""
        return [StoredShard(self.folder, file) for file in self.manifest.parts]


@contextlib.contextmanager
def opened(uri: str) -> Iterator[StoredCheckpoint]:
    """Open a checkpoint like StoredCheckpoint, and prevent its deletion until the `with` block ends."""
    with lease(_folder(uri)):
        yield StoredCheckpoint(uri)


def _folder(uri: str) -> ObjectPrefix:
    try:
        return ObjectPrefix(uri)
    except NoFolder as error:
        raise _gone(uri) from error


def _gone(uri: str) -> StorageError:
    return StorageError(
        f"{uri} has no {manifests.NAME}: it was never finished, or was deleted because newer checkpoints "
        "exist. Use one that `concertina checkpoint list` shows."
    )


def resolve(uri: str) -> str:
    """Return the URI of a checkpoint's own folder.

    If `uri` is a checkpoint's folder, the result is `uri`. If `uri` is a run's folder, the result is the folder of the
    newest checkpoint, which the object LATEST names. If `uri` is RUN/BEST, the result is the folder of the run's
    checkpoint with the lowest evaluation loss.

    Raises:
        InvalidInput: When `uri` is neither a checkpoint's folder nor the folder of a run that has a checkpoint.
        StorageError: When durable storage can't be read.
    """
    if (run := run_of_best(uri)) is not None:
        return best_uri(run)
    folder = ObjectPrefix(uri)
    if folder.get(manifests.NAME) is not None:
        return folder.uri
    latest = read_latest(folder)
    if latest is None:
        raise InvalidInput(
            f"{uri} is neither a checkpoint (there is no {manifests.NAME}) nor the folder of a run (LATEST "
            "is missing, or names no checkpoint because training went back and none from before is left)."
        )
    return f"{folder.uri}/{manifests.CheckpointKey.named_by(latest).folder}"


def _crc32(views: Iterable[memoryview], value: int) -> int:
    for view in views:
        value = zlib.crc32(view, value)
    return value


def _runs(parts: Sequence[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Group parts of a file that can be read together, and yield the groups in the order of the file.

    Two parts are in the same group if they are in the same block or in adjacent blocks and do not overlap.
    """
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
    """Return memory for the bytes from `begin` to `end` - 1 of a file, as consecutive views.

    The bytes of the requested parts (`run`) go into the memory of these parts. The bytes between the parts go into new
    buffers.
    """
    views: list[memoryview] = []
    for offset, target in run:
        views += [memoryview(bytearray(offset - begin)), target]
        begin = offset + len(target)
    return [*views, memoryview(bytearray(max(0, end - begin)))]
