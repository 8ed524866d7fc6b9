"""A file that comes in pieces: written, and brought to the disk, beside whoever makes the pieces."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

MOST_WAITING = 4
"""Pieces: who makes them waits for the writing then, not memory for either."""
SYNC = 32 << 20
"""Bytes after which the disk is set to work, once it is through with those before: a sync at the end alone would find
all of it still to be done."""
_DRAFT = re.compile(r".+#[0-9]+")


class FileWriter:
    """The file is there, whole and on the disk, once it is closed; with its name once its folder is synced."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file, self._draft = _open_draft(path)
        self._writing, self._syncing = (ThreadPoolExecutor(1, name) for name in ("write", "sync"))
        self._waiting: deque[Future[None]] = deque()
        self._sync: Future[None] | None = None
        self._unsynced = 0

    def write(self, piece: memoryview) -> None:
        """It must stay as it is until MOST_WAITING more have come. Raises OSError, of earlier ones too."""
        self._waiting.append(self._writing.submit(self._write, piece))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft().result()
        self._unsynced += len(piece)
        if self._unsynced >= SYNC:
            self._unsynced = 0
            self._finish_sync()
            self._sync = self._syncing.submit(os.fdatasync, self._file.fileno())

    def _finish_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()

    def _write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece) :]

    def close(self) -> None:
        """Raises OSError."""
        while self._waiting:
            self._waiting.popleft().result()
        self._finish_sync()
        os.fsync(self._file.fileno())
        self._draft.replace(self._path)
        self._end()

    def give_up(self) -> None:
        self._draft.unlink(missing_ok=True)
        self._end()

    def _end(self) -> None:
        for pool in (self._writing, self._syncing):
            pool.shutdown(cancel_futures=True)
        self._file.close()


def _open_draft(path: Path) -> tuple[io.FileIO, Path]:
    """Nobody else's, and called as obstore's own are, which its listings pass over."""
    for number in itertools.count(1):
        draft = path.with_name(f"{path.name}#{number}")
        with contextlib.suppress(FileExistsError):
            return io.FileIO(draft, "xb"), draft
    raise AssertionError("there is always another number")


def drafts(folder: Path) -> list[Path]:
    """Below it: being written, or left by who was killed; obstore's, too."""
    found = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    return [path for path in found if _DRAFT.fullmatch(path.name)]


def drop(draft: Path, top: Path) -> None:
    """And the folders below `top` that hold nothing else. Raises OSError."""
    draft.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        for folder in itertools.takewhile(lambda folder: folder != top, draft.parents):
            folder.rmdir()
