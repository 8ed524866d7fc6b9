"""Cache of data files from a store: a folder of bounded size that the workers of a node share.

Each time a worker opens a file, it compares the contents with the file's checksum.

If the store is slow or unreachable, the worker repeats the request until a deadline. Between two attempts, the worker
releases its lock on the file and deletes its draft, so that other workers can try. A worker of another job may succeed,
because that job may use a store that answers.

A draft is a file that is being fetched. It has its final size from the beginning, so that the space for it is reserved.

If a file is missing, incomplete or wrong, the worker requests the file twice more within seconds, and then raises an
error. The worker does the same if the store refuses the request, with one exception: if the store has answered this run
before, the worker keeps trying until the deadline, because the worker's access token may have expired.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import itertools
import math
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from concertina_data.fetch import Put, fetch, requesters
from concertina_data.files import Content, ManifestFile, map_of, mapped
from concertina_data.places import CacheSettings, OnWait
from concertina_data.threads import one_per_process
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import IMPATIENCE, ObjectPart, ObjectPrefix, StorageError, StoreRefused
from concertina_state.objects.retry import GRACE
from concertina_state.objects.stores import REQUEST

_BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0)
_LONG = 10.0
"""Seconds after which `waiting_for` reports a file that has not arrived or that another worker is still fetching."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
T = TypeVar("T")
_room_lock = one_per_process(lambda folder: threading.Lock())
"""Function that returns the in-memory lock of a cache folder, given the folder's real path.

Threads of one process wait for this lock, because they could only poll the lock of a file.
"""


class _Unanswered(Exception):
    """Error that the store has not answered a request, or that the request has failed."""

    def __init__(self, error: StorageError, requested_at: float) -> None:
        """Wrap the error of a request that was sent at `requested_at`, in monotonic seconds."""
        super().__init__(str(error))
        self.error, self.requested_at = error, requested_at


class Stored:
    """Data set in a store.

    A round is a period in which a fixed set of replicas trains. Copies of the data set's files are in a folder that all
    data sets and rounds on the node share. If the folder would exceed `cache.limit` bytes, the least recently used
    copies are deleted.
    """

    def __init__(self, uri: str, cache: CacheSettings) -> None:
        """Open the store that holds the data set.

        Raises:
            InvalidInput: When the settings for the store can't be used.
            StoreRefused: When the store refuses this run, although it answered in an earlier round.
            StorageError: When the cache folder can't be used.
        """
        self._cache, self._folder = cache, cache.folder
        self._has_answered = cache.begun
        """True if the store has answered at least one request, in this round or an earlier one."""
        self._waiting: dict[int, str] = {}
        self._opening: dict[int, tuple[float, ManifestFile]] = {}
        """File that each thread is opening, and the start of the call in monotonic seconds, keyed by thread."""
        self._requesters = requesters()
        with self._usable():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._room = _room_lock(self._folder.resolve())
        try:
            self._source = ObjectPrefix(uri, IMPATIENCE)
        except StoreRefused as error:
            if cache.begun:
                raise
            raise InvalidInput(str(error)) from error
        self.uri = self._source.uri

    @property
    def waiting_for(self) -> str:
        return next(itertools.chain(list(self._waiting.values()), self._late()), "")

    def _late(self) -> Iterator[str]:
        """Yield a sentence for users about each file for which a thread has waited longer than `_LONG` seconds."""
        now, limit = time.monotonic(), self._cache.patience + REQUEST.total_seconds()
        for since, file in list(self._opening.values()):
            if _LONG < now - since < limit:  # a longer wait is a hang, not a slow transfer
                yield f"{self.uri}/{file.file} ({file.size} bytes) takes long to arrive"

    def open(self, file: ManifestFile) -> Content:
        """Return the contents of the whole file.

        Raises:
            InvalidInput: When the file is missing or damaged.
            StorageError: When the deadline has passed, or the cache folder is full or not writable.
        """
        self._opening[threading.get_ident()] = time.monotonic(), file
        try:
            return self._patiently(lambda: self._open(file))
        finally:
            del self._opening[threading.get_ident()]

    def _open(self, file: ManifestFile) -> Content:
        """Return the contents of the whole file, from the cache or from the store.

        Raises:
            InvalidInput: When the file is missing or damaged.
            StorageError: When the cache folder is full or can't be used.
            _Unanswered: When the store does not answer.
        """
        path = self._folder / f"{file.sha256[:32]}.data"
        # Other workers of the node need the same file. If one of them hangs while it holds the lock, go on without the
        # lock.
        with self._locked(path.with_suffix(".lock")):
            cached = self._cached(path, file)
            if cached is not None:
                with contextlib.suppress(OSError):  # if another worker just deleted it, the mapping stays valid
                    path.touch()
                return cached
            draft = self._wait_for_room(path, file.size)
            return self._fetch_to_memory(file) if draft is None else self._fetch_to(draft, path, file)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Convert an OSError that the `with` block raises about the cache folder into a StorageError.

        Raises:
            StorageError: When the folder can't be used.
        """
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._folder} can't be used as a cache ({error.strerror}): make it writable for user {os.getuid()}, "
                "or set CONCERTINA_CACHE to another folder."
            ) from error

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[bool]:
        """Lock the file at `path` for the `with` block, and yield whether the lock was obtained.

        A worker normally holds the lock for at most one request. If another worker hangs and does not release the lock,
        this function yields False.
        """
        with contextlib.ExitStack() as stack:
            with self._usable():
                lock = stack.enter_context(path.open("w"))
                locked = _try_lock(lock, REQUEST.total_seconds())
            try:
                yield locked
            finally:  # a process that was forked meanwhile would keep the lock of a file that is only closed
                fcntl.flock(lock, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _making_room(self) -> Iterator[bool]:
        """Lock the cache folder for making room, during the `with` block, and yield whether the lock was obtained.

        Threads of this process wait for a lock in memory, because the lock of a file can only be polled.
        """
        if not self._room.acquire(timeout=REQUEST.total_seconds()):
            yield False
            return
        try:
            with self._locked(self._folder / "room.lock") as alone:
                yield alone
        finally:
            self._room.release()

    def _cached(self, path: Path, file: ManifestFile) -> Content | None:
        with self._usable():
            content = mapped(path)
        return content if content is not None and file.matches(content) else None

    def _fetch_to(self, draft: io.FileIO, path: Path, file: ManifestFile) -> Content:
        """Fetch a file from the store into its draft, give the draft its name in the cache, and return the contents.

        Raises:
            InvalidInput: When the file is missing or damaged.
            StorageError: When the folder is full.
            _Unanswered: When the store does not answer.
        """
        with draft, self._takes(file.size, draft):
            content = self._fetch(file, functools.partial(_write, draft.fileno()), lambda: map_of(draft.fileno()))
            with contextlib.suppress(FileNotFoundError):  # another process has deleted the draft
                Path(draft.name).replace(path)
        return content

    def _fetch_to_memory(self, file: ManifestFile) -> Content:
        """Fetch a file into memory, because the cache has no room for it.

        Raises:
            InvalidInput: When the file is missing or damaged.
            _Unanswered: When the store does not answer.
        """
        if not file.size:
            return self._fetch(file, lambda begin, data: None, lambda: b"")
        memory = mmap.mmap(-1, file.size)

        def put(begin: int, data: memoryview) -> None:
            memory[begin : begin + len(data)] = data

        return self._fetch(file, put, lambda: memory)

    def _fetch(self, file: ManifestFile, put: Put, content: Callable[[], Content]) -> Content:
        """Fetch a file from the store, write it with `put`, and return the result of `content`.

        `content` is called once the file is written. If the store has no correct file, try again a few times within
        seconds.

        Raises:
            InvalidInput: When the file is missing or damaged.
            _Unanswered: When the store does not answer.
        """
        fetched = None
        for wait in (*GRACE, 0.0):
            fetched = fetch(functools.partial(self._part, file.file), file.size, put, self._requesters)
            if fetched is None:
                time.sleep(wait)
            elif fetched.crc32 is not None:  # the written bytes are verified again only if the manifest has no crc32
                written = content()
                if fetched.crc32 == file.crc32 if file.crc32 is not None else file.matches(written):
                    return written
        raise file.missing(self.uri) if fetched is None else file.damaged(self.uri, fetched.size)

    def _part(self, key: str, span: tuple[int, int]) -> ObjectPart | None:
        """Return the bytes [begin, end) of an object, or None if the object does not exist. Send the request at once.

        Raises:
            _Unanswered: When the store does not answer.
        """
        return self._ask(lambda: self._source.get_part(key, span))

    def get(self, name: str, on_wait: OnWait = lambda reason, seconds: None) -> bytes | None:
        """Return the contents of a small file, or None if the file does not exist. Failed requests are repeated.

        While the store does not answer, `on_wait` is called repeatedly with the reason.

        Raises:
            InvalidInput: When the store refuses the request, and has not answered any request before.
            StorageError: When the deadline has passed.
        """
        return self._patiently(lambda: self._ask(lambda: self._source.get(name)), on_wait)

    def _ask(self, request: Callable[[], T]) -> T:
        """Send a request to the store once, without retries, and return its result.

        Raises:
            _Unanswered: When the store does not answer.
        """
        requested_at = time.monotonic()
        try:
            result = request()
        except StorageError as error:
            raise _Unanswered(error, requested_at) from error
        self._has_answered = True
        return result

    def _patiently(self, ask: Callable[[], T], on_wait: OnWait = lambda reason, seconds: None) -> T:
        """Return the result of `ask`, a request to the store. Repeat the request as long as the store does not answer.

        Raises:
            InvalidInput: When the store refuses the request, and has not answered any request before.
            StorageError: When the deadline has passed.
            AssertionError: Never: there is always another wait.
        """
        first_request_at, patience = math.inf, self._cache.patience
        grace = iter(GRACE)
        try:
            for seconds in _waits():
                try:
                    return ask()
                except _Unanswered as unanswered:
                    error, first_request_at = (
                        unanswered.error,
                        min(first_request_at, unanswered.requested_at),
                    )  # the wait for a lock or for a thread does not count
                    final = isinstance(error, StoreRefused) and not self._has_answered
                    wait = next(grace, None) if final else seconds
                    if wait is None:
                        raise InvalidInput(str(error)) from error
                    if time.monotonic() + wait > first_request_at + patience:
                        raise StorageError(f"{error} It was retried for {patience:.0f} s.") from error
                    self._waiting[threading.get_ident()] = str(error)
                    on_wait(str(error), time.monotonic() - first_request_at)
                    time.sleep(wait)
            raise AssertionError("there is always another wait")
        finally:
            self._waiting.pop(threading.get_ident(), None)

    def _wait_for_room(self, path: Path, size: int) -> io.FileIO | None:
        """Return an empty, locked draft of `size` bytes, or None if other writers leave no room for too long.

        Several threads and processes fetch and write at the same time. Only one makes room at a time, so that the size
        limit holds.

        Raises:
            StorageError: When the folder is full or can't be used.
        """
        until, pauses = time.monotonic() + REQUEST.total_seconds(), _pauses()
        while (draft := self._room_for(path, size)) is None and time.monotonic() <= until:
            time.sleep(next(pauses))
        return draft

    def _room_for(self, path: Path, size: int) -> io.FileIO | None:
        """Return an empty, locked draft of `size` bytes, after deleting old files to make room.

        The result is None if there will be room only after other writers have finished.

        Raises:
            StorageError: When the folder is full or can't be used.
        """
        with self._making_room() as alone, self._usable():
            if not alone:
                return None
            reserved = 0
            for other in self._folder.glob("*.draft"):
                if _is_left(other):
                    other.unlink(missing_ok=True)
                else:
                    reserved += _used(other)[1]
            draft = path.with_suffix(".draft")
            if draft.exists() or (reserved and size + reserved > self._cache.limit):
                return None
            cached = {file: _used(file) for file in self._folder.glob("*.data")}
            total = size + reserved + sum(size for _, size in cached.values())
            for file in sorted(cached, key=lambda file: cached[file]):
                if total <= self._cache.limit:
                    break
                total -= cached[file][1]
                file.unlink(missing_ok=True)  # existing mappings stay valid
            made = io.FileIO(draft, "x+b")
            with self._takes(size, made):
                fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
                made.truncate(size)
            return made

    @contextlib.contextmanager
    def _takes(self, size: int, draft: io.FileIO) -> Iterator[None]:
        """Context manager that deletes the draft if the `with` block fails to write it.

        Raises:
            StorageError: When the folder can't take the draft's `size` bytes.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                Path(draft.name).unlink()
            draft.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError(
                f"{self._folder} can't take a shard of {size} bytes ({error.strerror}): free "
                "space on this node, reduce the cache (trainer.data.cacheSize), or set "
                "CONCERTINA_CACHE to another folder."
            ) from error


def _is_left(draft: Path) -> bool:
    """Return whether a killed process left the draft. A process that is writing a draft holds a lock on it."""
    with contextlib.suppress(OSError), draft.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _try_lock(lock: IO[str], seconds: float) -> bool:
    """Try for at most `seconds` seconds to lock a file, and return whether that succeeded."""
    until, pauses = time.monotonic() + seconds, _pauses()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait between attempts to lock a file. A blocking lock would have no time limit."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def _write(descriptor: int, begin: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(descriptor, data, begin)
        begin, data = begin + count, data[count:]


def _waits() -> Iterator[float]:
    for seconds in itertools.chain(_BACKOFF, itertools.repeat(_BACKOFF[-1])):
        yield seconds * random.uniform(0.7, 1.3)


def _used(path: Path) -> tuple[float, int]:
    """Return the time of the last use of a cached file (Unix seconds), and its size in bytes."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_mtime, status.st_size
    return 0.0, 0
