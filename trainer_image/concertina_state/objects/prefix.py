"""Access to the objects below a URI. Error messages say what the user can do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PreconditionError,
)
from obstore.store import LocalStore

from concertina_state.errors import InvalidInput
from concertina_state.objects import messages
from concertina_state.objects.file_writer import MOST_WAITING, FileWriter, drafts, drop
from concertina_state.objects.stores import KINDS, CloudStore, open_store

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion, WritableFile
    from obstore.store import RetryConfig

PATIENCE = timedelta(seconds=20)
"""Time for which a failed request is repeated before an error is raised."""
IMPATIENCE = timedelta(seconds=3)
SCHEMES = f"{', '.join(f'{scheme}://' for scheme in KINDS)} or file://"
CONCURRENCY = 8
"""Number of concurrent requests."""
PIECE = 16 << 20
"""Number of bytes per request for a large object."""
MOST_PIECES = 5000
"""Maximum number of pieces of an object (S3 allows 10,000)."""
HELD = MOST_WAITING
"""Maximum number of pieces of an object that wait in memory until they are written."""
MOST_VIEWS = 1024
"""Maximum number of buffers that one system call fills (IOV_MAX)."""
AGAIN = 0.2
"""Seconds before the first repetition of a request whose answer was cut off."""
T = TypeVar("T")
_client_process = 0
"""Id of the process whose threads send the requests, or 0 if no request has been sent."""


class StorageError(Exception):
    """Error that an operation on durable storage failed. The message says what happened and what to do."""


class StoreRefused(StorageError):
    """Error that the store refused a request. A retry is unlikely to help, so a person must act."""


class Missing(StoreRefused):
    """Error that a required object does not exist, or is shorter than the requested range."""


class NoFolder(StoreRefused):
    """Error that the folder of a `file://` URI or a plain path does not exist."""


class Changed(Exception):
    """Error of a conditional write: the object is no longer of the version that the write requires."""


@dataclasses.dataclass(frozen=True)
class ObjectEntry:
    """Size and time of an object in a listing."""

    size: int
    """Size in bytes."""
    at: datetime.datetime
    """Time of the last write, by the store's clock."""


@dataclasses.dataclass(frozen=True)
class ObjectPart:
    """Part of an object."""

    data: memoryview
    object_size: int
    """Size of the whole object in bytes."""


def parts_of(uri: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket or container, and the path of a URI. For a plain path, only the path is not empty.

    `?`, `#` and `%` have no special meaning, because they may be part of names.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return "", "", uri
    holder, slash, path = rest.partition("/")
    return scheme, holder, slash + path


class ObjectPrefix:
    """Objects below one URI. Keys are relative to the URI. Every method can raise StorageError."""

    def __init__(self, uri: str, patience: timedelta = PATIENCE, create: bool = False) -> None:
        self.uri, self._patience = uri.rstrip("/"), patience.total_seconds()
        scheme, self._holder, path = parts_of(self.uri)
        self._directory: Path | None = None
        self._kind = KINDS.get(scheme)
        self._store: CloudStore | LocalStore
        if self._kind is not None:
            with self._as_messages(messages.OPEN, missing_is_error=True):
                retry: RetryConfig = {"max_retries": 50, "retry_timeout": patience}
                prefix = path.strip("/") or None
                self._store = open_store(scheme, self._holder, prefix, retry)
        elif scheme in ("file", ""):
            self._directory = Path(path)
            if self._directory.exists() and not self._directory.is_dir():
                raise StoreRefused(f"{self._directory} is a file, but a folder is needed: correct the URI.")
            if not create and not self._directory.is_dir():
                raise NoFolder(f"The folder {self._directory} does not exist: create it, or correct the URI.")
            with self._as_messages(messages.OPEN):
                self._store = LocalStore(self._directory, mkdir=create, automatic_cleanup=True)
        else:
            raise StoreRefused(f"{uri} can't be used: its scheme must be {SCHEMES}.")

    @property
    def store_name(self) -> str:
        """Name of the store for error messages: the endpoint of a cloud store, or the folder."""
        return self._kind.endpoint() if self._kind else self.uri

    def get(self, key: str) -> bytes | None:
        """Return the contents of an object, or None if it does not exist."""
        versioned = self.get_version(key)
        return None if versioned is None else versioned[0]

    def get_version(self, key: str) -> tuple[bytes, UpdateVersion] | None:
        """Return the contents of an object and its version for `put_if`, or None if the object does not exist."""
        try:
            with self._as_messages(f"read {key}"):
                result = obstore.get(self._store, key)
                return bytes(result.bytes()), _version(result.meta)
        except FileNotFoundError:
            return None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the contents of several objects as `get` does, by concurrent requests."""
        with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self.get, keys))

    def get_part(self, key: str, span: tuple[int, int]) -> ObjectPart | None:
        """Return the bytes [begin, end) of an object.

        The result is None if the object does not exist. The part is shorter if the object ends before `end`.
        """
        try:
            with self._as_messages(f"read {key}"):
                result = obstore.get(self._store, key, options={"range": span})
                return ObjectPart(memoryview(result.bytes()), result.meta["size"])
        except FileNotFoundError:
            return None
        except Missing:  # the object ends before `begin`, or is empty
            return self._empty_part(key)

    def _empty_part(self, key: str) -> ObjectPart | None:
        """Return a part without bytes, with the object's size.

        The object may be much larger than this machine's memory.
        """
        try:
            with self._as_messages(f"read {key}"):
                return ObjectPart(memoryview(b""), obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each range [begin, end)."""
        with self._as_messages(f"read {key}", missing_is_error=True):
            starts, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
            return [memoryview(data) for data in obstore.get_ranges(self._store, key, starts=starts, ends=ends)]

    def read_into(self, key: str, begin: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, with the bytes of an object, from offset `begin` on.

        Raises:
            Missing: When the object ends before the views are full.
        """
        size = sum(map(len, views))
        with self._as_messages(f"read {key}", missing_is_error=True):
            if self._directory is not None:
                read = _read_file(self._directory / key, begin, views)
            else:
                with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
                    fetch = functools.partial(self._read_piece, key, begin, views)
                    read = sum(pool.map(fetch, range(0, size, PIECE)))
        if read < size:
            raise Missing(f"{self.uri}/{key} ends before byte {begin + size}.")

    def _read_piece(self, key: str, begin: int, views: Sequence[memoryview], offset: int) -> int:
        targets = list(window(views, offset, offset + PIECE))
        start = begin + offset
        data = memoryview(obstore.get_range(self._store, key, start=start, end=start + sum(map(len, targets))))
        read = len(data)
        for target in targets:
            part, data = data[: len(target)], data[len(target) :]
            target[: len(part)] = part
        return read

    def put_pieces(self, key: str, pieces: Iterable[memoryview], size: int) -> None:
        """Write an object of about `size` bytes from pieces.

        A piece must not change until HELD more pieces have been produced. The object appears once all pieces are
        written.
        """
        writing = functools.partial(self._as_messages, f"write {key}", missing_is_error=True)
        with writing():
            if self._directory is not None:
                writer: FileWriter | WritableFile = FileWriter(self._directory / key)
            else:
                writer = obstore.open_writer(self._store, key, buffer_size=max(PIECE, size // MOST_PIECES))
        try:
            for piece in pieces:
                with writing():
                    if isinstance(writer, FileWriter):
                        writer.write(piece)
                    else:  # obstore's writer keeps a reference to the bytes until they are sent
                        writer.write(bytes(piece))
            with writing():
                writer.close()
        except BaseException:
            if isinstance(writer, FileWriter):
                writer.give_up()
            raise

    def forget(self, pattern: str) -> None:
        """Remove the files that match `pattern` from the kernel's page cache, except the newest file.

        The files that are written next can then use this memory (decision "Older parts are dropped from the page
        cache").
        """
        if self._directory is None:
            return
        with contextlib.suppress(OSError):  # a file was deleted meanwhile, or the file system has no page cache
            for path in sorted(self._directory.glob(pattern), key=lambda path: path.stat().st_mtime_ns)[:-1]:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def put(self, key: str, value: bytes | Path) -> None:
        size = value.stat().st_size if isinstance(value, Path) else len(value)
        chunk = max(PIECE, size // MOST_PIECES)
        with self._as_messages(f"write {key}", missing_is_error=True):
            self._whole(lambda: obstore.put(self._store, key, value, chunk_size=chunk))

    def settle(self, keys: Sequence[str]) -> None:
        """Wait until the objects with these keys are durable: they survive a power loss.

        In a cloud store, objects are durable as soon as they are written. In a folder, the files are synced here,
        because the kernel writes them to the disk later (decision "Checkpoint files are synced to disk").
        """
        if self._directory is None:
            return
        paths = [self._directory / key for key in keys]
        folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(self._directory)}
        with self._as_messages(f"write {', '.join(keys)}", missing_is_error=True):
            for path in (*paths, *sorted(folders, reverse=True)):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def put_if(self, key: str, value: bytes, version: UpdateVersion | None) -> None:
        """Write an object if its version is `version`. If `version` is None, write it only if it does not exist yet.

        Raises:
            Changed: When the object's version differs, or the object exists although `version` is None.
        """
        with self._as_messages(f"write {key}", missing_is_error=True):
            try:
                if self._directory is not None:
                    self._put_if_local(self._directory / key, value, version)
                else:
                    obstore.put(self._store, key, value, mode=version or "create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as error:
                raise Changed(key) from error

    def _put_if_local(self, path: Path, value: bytes, version: UpdateVersion | None) -> None:
        """Write a file if it has the given version, or if it does not exist and `version` is None.

        obstore does not support conditional overwrites of files. A lock file beside the file prevents concurrent writes
        on this file system.

        Raises:
            Changed: When the file has another version.
        """
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            present = self.get_version(path.name)
            if (present and present[1]) != version:
                raise Changed(path.name)
            obstore.put(self._store, path.name, value)
            self.settle([path.name])

    def entries(self, prefix: str = "") -> dict[str, ObjectEntry]:
        """Return the size and time of each object below the folder `prefix`, keyed by the object's key."""
        with self._as_messages(f"list {prefix}"):
            items = self._whole(lambda: [item for batch in obstore.list(self._store, prefix or None) for item in batch])
            return {item["path"]: ObjectEntry(item["size"], item["last_modified"]) for item in items}

    def list(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of each object below the folder `prefix`, keyed by the object's key."""
        return {key: entry.size for key, entry in self.entries(prefix).items()}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. It is no error if an object does not exist."""

        def delete_one(key: str) -> None:
            with self._as_messages(f"delete {key}"), contextlib.suppress(FileNotFoundError):
                self._whole(lambda: obstore.delete(self._store, key))

        with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(delete_one, keys))

    def drafts(self, prefix: str) -> tuple[str, ...]:
        """Return the keys of unfinished files below the folder `prefix`.

        An unfinished file is either being written, or was left by a process that was killed. Cloud stores have none.
        """
        if self._directory is None:
            return ()
        with self._as_messages(f"list {prefix}"):
            paths = drafts(self._directory / prefix)
        return tuple(str(path.relative_to(self._directory)) for path in paths)

    def drop_drafts(self, keys: Iterable[str]) -> None:
        """Delete unfinished files, and then the folders that have become empty.

        If a process is still writing such a file, the process gets an error.
        """
        for key in keys:
            assert self._directory is not None
            with self._as_messages(f"delete {key}"):
                drop(self._directory / key, self._directory)

    def _whole(self, ask: Callable[[], T]) -> T:
        """Return the result of the request `ask`.

        If the connection ends before the answer is complete, repeat the request, because obstore does not do this
        itself. The request must be safe to repeat.

        Raises:
            GenericError: When the request fails for another reason, or the time limit of this prefix has passed.
        """
        started, wait = time.monotonic(), AGAIN
        while True:
            try:
                return ask()
            except GenericError as error:
                if time.monotonic() + wait > started + self._patience or not messages.cut_off(error):
                    raise
            time.sleep(wait)
            wait *= 2

    @contextlib.contextmanager
    def _as_messages(self, doing: str, missing_is_error: bool = False) -> Iterator[None]:
        if doing != messages.OPEN:
            _check_not_forked()
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not missing_is_error and messages.is_missing(error):
                raise
            message, refused = self._message(doing, error)
            kind = Missing if messages.is_missing(error) else StoreRefused if refused else StorageError
            raise kind(message) from error

    def _message(self, doing: str, error: Exception) -> messages.StoreMessage:
        if self._kind is None:
            return messages.of_files(self.uri, doing, error)
        return messages.of_cloud(self.uri, self._kind, self._holder, doing, error)


def _check_not_forked() -> None:
    """Check that the threads that send requests are alive. A forked process does not have its parent's threads.

    Raises:
        InvalidInput: When a parent process has sent requests. A request of this process would never return.
    """
    global _client_process
    _client_process = _client_process or os.getpid()
    if _client_process != os.getpid():
        raise InvalidInput(
            "this process can't use storage, because it was forked from a process that has used storage: start it by "
            "spawn, such as multiprocessing_context='spawn' of a DataLoader, or do not use storage before the fork."
        )


def window(views: Iterable[memoryview], begin: int, end: int) -> Iterator[memoryview]:
    """Yield views of the bytes from `begin` to `end` - 1, counted over a sequence of views."""
    offset = 0
    for view in views:
        if part := view[max(0, begin - offset) : max(0, end - offset)]:
            yield part
        offset += len(view)


def _read_file(path: Path, begin: int, views: Sequence[memoryview]) -> int:
    """Read a file from offset `begin` directly into the views, and return the number of bytes read."""
    with path.open("rb", buffering=0) as file:
        size, read = sum(map(len, views)), 0
        while read < size:
            targets = itertools.islice(window(views, read, size), MOST_VIEWS)
            count = os.preadv(file.fileno(), list(targets), begin + read)
            if not count:
                break
            read += count
        return read


def _version(meta: ObjectMeta) -> UpdateVersion:
    """Return the version of an object, which is its ETag (S3, Azure) or its generation (Google)."""
    version: UpdateVersion = {}
    if meta["e_tag"]:
        version["e_tag"] = meta["e_tag"]
    if meta["version"]:
        version["version"] = meta["version"]
    return version
