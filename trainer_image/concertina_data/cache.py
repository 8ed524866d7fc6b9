"""Files of data in a store, fetched into a bounded folder that the node's workers share.

A file is compared with its checksum each time it is opened. A store that is slow or lost is asked again and again until
the deadline, and between tries the other workers have their turn: they may be of another job, whose store answers. What
is not there, cut off or wrong is asked for again within seconds, and named where it stays so; so is what a store
refuses, unless it has been given before: a token that expired is a reason to wait.
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
"""Seconds after which a file that comes slowly, or that another worker fetches, is told as waited for."""
_SLICE = 0.05
"""Seconds from one look at a lock to the next: a wait in the kernel would have no end."""
T = TypeVar("T")


class _Unanswered(Exception):
    """A request to the store that gave nothing."""

    def __init__(self, error: StorageError, asked: float) -> None:
        """`asked`: when, in monotonic seconds."""
        super().__init__(str(error))
        self.error, self.asked = error, asked


class Stored:
    """A data set in a store. The folder of copies has at most `cache.limit` bytes, for all data sets and rounds; files
    that were not used for longest give way."""

    def __init__(self, uri: str, cache: CacheSettings) -> None:
        """Raises InvalidInput, or StorageError, where the settings for it can't be used."""
        self._cache, self._folder = cache, cache.folder
        self._gave = cache.begun
        """Whether the store has given anything, now or in an earlier round."""
        self._waiting: dict[int, str] = {}
        self._opening: dict[int, tuple[float, ManifestFile]] = {}
        """By thread: since when, and what."""
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
        now, most = time.monotonic(), self._cache.patience + REQUEST.total_seconds()
        for since, wanted in list(self._opening.values()):
            if _LONG < now - since < most:  # for longer it hangs
                yield f"{self.uri}/{wanted.file} ({wanted.size} bytes) is long in coming"

    def open(self, wanted: ManifestFile) -> Content:
        """The whole file. Raises InvalidInput where it is missing or damaged, StorageError after the deadline, or where
        the node has no room for it or lets nobody write it."""
        self._opening[threading.get_ident()] = time.monotonic(), wanted
        try:
            return self._patiently(lambda: self._open(wanted))
        finally:
            del self._opening[threading.get_ident()]

    def _open(self, wanted: ManifestFile) -> Content:
        """Raises _Unanswered, too."""
        path = self._folder / f"{wanted.sha256[:32]}.data"
        # The node's other workers want the same one; past who stands still with the lock we fetch for ourselves.
        with self._locked(path.with_suffix(".lock")):
            held = self._held(path, wanted)
            if held is not None:
                with contextlib.suppress(OSError):  # it gave way just now, but it is mapped
                    path.touch()
                return held
            content = self._fetch(wanted)
            self._keep(path, content)
        kept = self._held(path, wanted)
        return content if kept is None else kept

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Around what is done in the folder."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._folder} can't be used as a cache ({error.strerror}): make it writable for user {os.getuid()}, "
                "or set CONCERTINA_CACHE to another folder."
            ) from error

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[bool]:
        """Others have it for a request at most; false where one of them stands still with it."""
        with contextlib.ExitStack() as stack:
            with self._usable():
                lock = stack.enter_context(path.open("w"))
                locked = _taken(lock, REQUEST.total_seconds())
            yield locked

    def _held(self, path: Path, wanted: ManifestFile) -> Content | None:
        with self._usable():
            held = mapped(path)
        return held if held is not None and wanted.matches(held) else None

    def _fetch(self, wanted: ManifestFile) -> bytes:
        content = None
        for wait in (*GRACE, 0.0):
            content = self._ask(wanted.file)
            if content is None:
                time.sleep(wait)
            elif wanted.matches(content):
                return content
        raise wanted.missing(self.uri) if content is None else wanted.damaged(self.uri, len(content))

    def get(self, name: str, on_wait: OnWait = lambda reason, seconds: None) -> bytes | None:
        """Patiently; None where there is no such object. `on_wait`: why it is waited for, again and again. Raises
        StorageError after the deadline, and InvalidInput where a store that has given nothing yet refuses."""
        return self._patiently(lambda: self._ask(name), on_wait)

    def _ask(self, name: str) -> bytes | None:
        asked = time.monotonic()
        try:
            content = self._source.get(name)
        except StorageError as error:
            raise _Unanswered(error, asked) from error
        self._gave = True
        return content

    def _patiently(self, ask: Callable[[], T], on_wait: OnWait = lambda reason, seconds: None) -> T:
        """What `ask` returns, which is called again where the store did not answer it."""
        begun, patience = math.inf, self._cache.patience
        grace = iter(GRACE)
        try:
            for seconds in _waits():
                try:
                    return ask()
                except _Unanswered as unanswered:
                    error, begun = unanswered.error, min(begun, unanswered.asked)  # not since it waited for its turn
                    final = isinstance(error, StoreRefused) and not self._gave
                    wait = next(grace, None) if final else seconds
                    if wait is None:
                        raise InvalidInput(str(error)) from error
                    if time.monotonic() + wait > begun + patience:
                        raise StorageError(f"{error} It was tried for {patience:.0f} s.") from error
                    self._waiting[threading.get_ident()] = str(error)
                    on_wait(str(error), time.monotonic() - begun)
                    time.sleep(wait)
            raise AssertionError("there is always another wait")
        finally:
            self._waiting.pop(threading.get_ident(), None)

    def _keep(self, path: Path, content: bytes) -> None:
        """Write it, after room was made; one process at a time, so that the bound holds. Raises StorageError."""
        with self._locked(self._folder / "room.lock") as alone, self._usable():
            if not alone:
                return
            for left in self._folder.glob("*.draft"):  # by who was killed: nobody else writes now
                left.unlink(missing_ok=True)
            held = {other: _used(other) for other in self._folder.glob("*.data") if other != path}
            total = len(content) + sum(size for _, size in held.values())
            for other in sorted(held, key=lambda other: held[other]):
                if total <= self._cache.limit:
                    break
                total -= held[other][1]
                other.unlink(missing_ok=True)  # who has it mapped keeps it
            draft = path.with_suffix(".draft")
            try:
                draft.write_bytes(content)
            except OSError as error:
                with contextlib.suppress(OSError):  # perhaps it could not even be made
                    draft.unlink()
                raise StorageError(
                    f"{self._folder} can't take a shard of {len(content)} bytes ({error.strerror}): make room on this "
                    "node, let the cache keep less (trainer.data.cacheSize), or set CONCERTINA_CACHE to another folder."
                ) from error
            draft.replace(path)


def _taken(lock: IO[str], seconds: float) -> bool:
    """Whether nobody else had it at some time within so many seconds; it is ours then."""
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
    """When it was used last, and its size."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_mtime, status.st_size
    return 0.0, 0
