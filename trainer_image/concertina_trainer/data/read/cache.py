"""Files of data on this node: read where they lie, or fetched into a bounded folder that the node's workers share.

A file is compared with its checksum each time it is opened. A store that is slow or lost is asked again and again until
the deadline. What is not there, cut off or wrong is asked for again within seconds, and named where it stays so; so is
what a store refuses, unless it has been given before: a token that expired is a reason to wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from concertina_state.errors import BadInput
from concertina_state.objects.prefix import IMPATIENCE, ObjectPrefix, StorageError, StoreRefused
from concertina_state.objects.retry import GRACE
from concertina_trainer.data.manifest import TokenShard

OnWait = Callable[[str, float], None]
"""Why something is waited for, in a sentence, and for how many seconds now."""
_BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class ManifestFile:
    """A file as the manifest describes it."""

    file: str
    size: int
    sha256: str
    crc32: int | None = None
    """Where it is known, it is what is compared: twice as fast."""

    def matches(self, content: mmap.mmap | bytes) -> bool:
        if len(content) != self.size:
            return False
        if self.crc32 is not None:
            return zlib.crc32(content) == self.crc32
        return hashlib.sha256(content).hexdigest() == self.sha256

    def damaged(self, place: str, size: int) -> BadInput:
        return BadInput(
            f"{place}/{self.file} is damaged: the manifest says {self.size} bytes with sha256 {self.sha256}, and what "
            f"is there has {size} bytes and another checksum. Copy it again, or build the data again."
        )


def tokens_file(shard: TokenShard) -> ManifestFile:
    return ManifestFile(shard.file, shard.size, shard.sha256, shard.crc32)


def documents_file(shard: TokenShard) -> ManifestFile:
    return ManifestFile(shard.documents_file, 8 * shard.documents, shard.documents_sha256)


class Cache:
    """Of at most `limit` bytes, for all data sets and rounds; files that were not used for longest give way."""

    def __init__(self, folder: Path, limit: int, patience: float, begun: bool) -> None:
        """`patience`: seconds for which a store that doesn't answer is asked again. `begun`: the run has read its data
        before, in an earlier round."""
        self._folder, self._limit, self._patience, self._begun = folder, limit, patience, begun
        self._gave: set[str] = set()
        self._waiting: dict[int, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def waiting_for(self) -> str:
        """Why a thread is waiting for a store right now: a sentence; "" where none is."""
        return next(iter(list(self._waiting.values())), "")

    def folder(self, uri: str) -> ObjectPrefix:
        """To give to the other methods. Raises BadInput, or StorageError, where the settings for it can't be used."""
        try:
            return ObjectPrefix(uri, IMPATIENCE)
        except StoreRefused as error:
            if self._begun:
                raise
            raise BadInput(str(error)) from error

    def open(self, source: ObjectPrefix, wanted: ManifestFile) -> NDArray[np.uint8]:
        """The whole file. Raises BadInput where it is missing or damaged, StorageError after the deadline, or where
        the node has no room for it."""
        if "://" not in source.uri or source.uri.startswith("file://"):
            return _open_in_place(source.uri.removeprefix("file://"), wanted)
        path = self._folder / f"{wanted.sha256[:32]}.data"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the node's other workers want the same one
            held = _mapped(path)
            if held is not None and wanted.matches(held):
                with contextlib.suppress(FileNotFoundError):  # it gave way just now, but it is mapped
                    path.touch()
                return np.frombuffer(held, np.uint8)
            content = self._fetch(source, wanted)
            self._keep(path, content)
        mapped = _mapped(path)
        return np.frombuffer(mapped if mapped is not None and wanted.matches(mapped) else content, np.uint8)

    def _fetch(self, source: ObjectPrefix, wanted: ManifestFile) -> bytes:
        content = None
        for wait in (*GRACE, 0.0):
            content = self.get(source, wanted.file)
            if content is None:
                time.sleep(wait)
            elif wanted.matches(content):
                return content
        raise _missing(source.uri, wanted.file) if content is None else wanted.damaged(source.uri, len(content))

    def get(self, source: ObjectPrefix, key: str, on_wait: OnWait = lambda reason, seconds: None) -> bytes | None:
        """Patiently; None where there is no such object. `on_wait`: why it is waited for, again and again. Raises
        StorageError after the deadline, and BadInput where a store that has given nothing yet refuses."""
        begun = time.monotonic()
        deadline, grace = begun + self._patience, iter(GRACE)
        try:
            for seconds in _waits():
                try:
                    content = source.get(key)
                    self._gave.add(source.uri)
                    return content
                except StorageError as error:
                    final = isinstance(error, StoreRefused) and not self._begun and source.uri not in self._gave
                    wait = next(grace, None) if final else seconds
                    if wait is None:
                        raise BadInput(str(error)) from error
                    if time.monotonic() + wait > deadline:
                        raise StorageError(f"{error} It was tried for {self._patience:.0f} s.") from error
                    self._waiting[threading.get_ident()] = str(error)
                    on_wait(str(error), time.monotonic() - begun)
                    time.sleep(wait)
            raise AssertionError("there is always another wait")
        finally:
            self._waiting.pop(threading.get_ident(), None)

    def _keep(self, path: Path, content: bytes) -> None:
        """Write it, after room was made; one process at a time, so that the bound holds. Raises StorageError."""
        with (self._folder / "room.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in self._folder.glob("*.draft"):  # by who was killed: nobody else writes now
                left.unlink(missing_ok=True)
            held = {other: _used(other) for other in self._folder.glob("*.data") if other != path}
            total = len(content) + sum(size for _, size in held.values())
            for other in sorted(held, key=lambda other: held[other]):
                if total <= self._limit:
                    break
                total -= held[other][1]
                other.unlink(missing_ok=True)  # who has it mapped keeps it
            draft = path.with_suffix(".draft")
            try:
                draft.write_bytes(content)
            except OSError as error:
                draft.unlink()
                raise StorageError(
                    f"{self._folder} can't take a shard of {len(content)} bytes ({error.strerror}): make room on this "
                    "node, lower trainer.data.cacheMebibytes, or set CONCERTINA_CACHE to another folder."
                ) from error
            draft.replace(path)


def _waits() -> Iterator[float]:
    for seconds in itertools.chain(_BACKOFF, itertools.repeat(_BACKOFF[-1])):
        yield seconds * random.uniform(0.7, 1.3)


def folder_on_node() -> Path:
    return Path(os.environ.get("CONCERTINA_CACHE", Path(tempfile.gettempdir(), f"concertina-data-{os.getuid()}")))


def _open_in_place(folder: str, wanted: ManifestFile) -> NDArray[np.uint8]:
    content = _mapped(Path(folder, wanted.file))
    if content is None:
        raise _missing(folder, wanted.file)
    if not wanted.matches(content):
        raise wanted.damaged(folder, len(content))
    return np.frombuffer(content, np.uint8)


def _missing(place: str, file: str) -> BadInput:
    return BadInput(f"{place}/{file} is missing though the manifest names it: bring it back, or build again.")


def _mapped(path: Path) -> mmap.mmap | bytes | None:
    """None where there is no such file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if os.fstat(file.fileno()).st_size else b""
    return None


def _used(path: Path) -> tuple[float, int]:
    """When it was used last, and its size."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_mtime, status.st_size
    return 0.0, 0
