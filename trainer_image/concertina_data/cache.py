"""Cache of data files from a store, in a folder of bounded size that the workers of a node share.

Each time a worker opens a file, it compares the contents with the file's checksum.

If the store is slow or unreachable, the worker repeats the request until a deadline. Between two attempts, the worker
releases its lock on the file, so that other workers can try. A worker of another job may have access to a store that
answers.

If a file is missing, incomplete or wrong, the worker requests the file twice more within seconds, and then raises an
error. The worker does the same if the store refuses the request, with one exception: if the store has answered this run
before, the worker keeps trying until the deadline, because its token may have expired.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from concertina_data.files import Content, ManifestFile, mapped
from concertina_data.places import CacheSettings, OnWait
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import IMPATIENCE, ObjectPrefix, StorageError, StoreRefused
from concertina_state.objects.retry import GRACE
from concertina_state.objects.stores import REQUEST

_BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0)
_LONG = 10.0
"""Seconds after which `waiting_for` reports a file that has not arrived, or that another worker is still fetching."""
_SLICE = 0.05
"""Seconds between two attempts to take a lock. A blocking lock would have no time limit."""
T = TypeVar("T")


class _Unanswered(Exception):
    """Error that the store has not answered a request, or that the request has failed."""

    def __init__(self, error: StorageError, requested_at: float) -> None:
        """Wrap the error of a request that was sent at `requested_at`, in monotonic seconds."""
        super().__init__(str(error))
        self.error, self.requested_at = error, requested_at


class Stored:
    """Data set in a store.

    Copies of its files lie in a folder that all data sets and rounds of the node share. If the folder would exceed
    `cache.limit` bytes, the least recently used copies are deleted.
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
        """True if the store has answered a request, in this round or an earlier one."""
        self._waiting: dict[int, str] = {}
        self._opening: dict[int, tuple[float, ManifestFile]] = {}
        """Files that are being opened, by thread: the time at which the call began, in monotonic seconds, and the
        file."""
        with self._usable():
            self._folder.mkdir(parents=True, exist_ok=True)
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
            content = self._fetch(file)
            self._keep(path, content)
        stored = self._cached(path, file)
        return content if stored is None else stored

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
            yield locked

    def _cached(self, path: Path, file: ManifestFile) -> Content | None:
        with self._usable():
            content = mapped(path)
        return content if content is not None and file.matches(content) else None

    def _fetch(self, file: ManifestFile) -> bytes:
        """Fetch a file from the store. If the store has no correct file, try again a few times within seconds.

        Raises:
            InvalidInput: When the file is missing or damaged.
            _Unanswered: When the store does not answer.
        """
        content = None
        for wait in (*GRACE, 0.0):
            content = self._ask(file.file)
            if content is None:
                time.sleep(wait)
            elif file.matches(content):
                return content
        raise file.missing(self.uri) if content is None else file.damaged(self.uri, len(content))

    def get(self, name: str, on_wait: OnWait = lambda reason, seconds: None) -> bytes | None:
        """Return the contents of a small file, or None if the file does not exist. Failed requests are repeated.

        While the store does not answer, `on_wait` is called repeatedly with the reason.

        Raises:
            InvalidInput: When the store refuses, and has not answered any request before.
            StorageError: When the deadline has passed.
        """
        return self._patiently(lambda: self._ask(name), on_wait)

    def _ask(self, name: str) -> bytes | None:
        """Request an object from the store once, without retries. Return None if the object does not exist.

        Raises:
            _Unanswered: When the store does not answer.
        """
        requested_at = time.monotonic()
        try:
            content = self._source.get(name)
        except StorageError as error:
            raise _Unanswered(error, requested_at) from error
        self._has_answered = True
        return content

    def _patiently(self, ask: Callable[[], T], on_wait: OnWait = lambda reason, seconds: None) -> T:
        """Return the result of `ask`, a request to the store. Repeat the request as long as the store does not answer.

        Raises:
            InvalidInput: When the store refuses, and has not answered any request before.
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
                    )  # the wait for a lock does not count
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

    def _keep(self, path: Path, content: bytes) -> None:
        """Write a file to the cache, after deleting old files to make room.

        Only one process does this at a time, so that the size limit holds.

        Raises:
            StorageError: When the folder is full or can't be used.
        """
        with self._locked(self._folder / "room.lock") as alone, self._usable():
            if not alone:
                return
            for leftover in self._folder.glob("*.draft"):  # left by killed processes: only one process writes at a time
                leftover.unlink(missing_ok=True)
            cached = {file: _used(file) for file in self._folder.glob("*.data") if file != path}
            total = len(content) + sum(size for _, size in cached.values())
            for file in sorted(cached, key=lambda file: cached[file]):
                if total <= self._cache.limit:
                    break
                total -= cached[file][1]
                file.unlink(missing_ok=True)  # existing mappings stay valid
            draft = path.with_suffix(".draft")
            try:
                draft.write_bytes(content)
            except OSError as error:
                with contextlib.suppress(OSError):  # it may not exist
                    draft.unlink()
                raise StorageError(
                    f"{self._folder} can't take a shard of {len(content)} bytes ({error.strerror}): free "
                    "space on this node, reduce the cache (trainer.data.cacheSize), or set "
                    "CONCERTINA_CACHE to another folder."
                ) from error
            draft.replace(path)


def _try_lock(lock: IO[str], seconds: float) -> bool:
    """Try for at most `seconds` seconds to lock a file, and return whether that succeeded."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_SLICE)


def _waits() -> Iterator[float]:
    for seconds in itertools.chain(_BACKOFF, itertools.repeat(_BACKOFF[-1])):
        yield seconds * random.uniform(0.7, 1.3)


def _used(path: Path) -> tuple[float, int]:
    """Return the time of the last use of a cached file (Unix seconds), and its size in bytes."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_mtime, status.st_size
    return 0.0, 0
