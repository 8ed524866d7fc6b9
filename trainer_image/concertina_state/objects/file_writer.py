"""Writer of a file whose contents arrive in pieces, which threads write and sync in the background."""

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
"""Maximum number of pieces that wait to be written.

A caller that produces pieces faster has to wait, so that memory use is bounded.
"""
SYNC = 32 << 20
"""Number of bytes after which a thread starts to sync the file, unless an earlier sync is still running.

Without these syncs, the sync at the end would have to write the whole file to the disk.
"""
_DRAFT = re.compile(r".+#[0-9]+")


class FileWriter:
    """Writer of a file that gets its name when it is closed, after all its contents are on the disk.

    The name survives a power loss only after the folder has been synced too.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file, self._draft = _open_draft(path)
        self._writing, self._syncing = (ThreadPoolExecutor(1, name) for name in ("write", "sync"))
        self._waiting: deque[Future[None]] = deque()
        self._sync: Future[None] | None = None
        self._unsynced = 0

    def write(self, piece: memoryview) -> None:
        """Queue a piece for writing. The piece must not change until MOST_WAITING more pieces have been queued.

        Raises:
            OSError: When this piece or an earlier one can't be written.
        """
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
        """Wait until all contents are on the disk, and then give the file its name.

        Raises:
            OSError: When a piece can't be written or synced.
        """
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
    """Create a draft file that no other writer uses.

    The name has the same form as the names of obstore's own drafts, which obstore leaves out of listings.

    Raises:
        AssertionError: Never: there is always another number.
    """
    for number in itertools.count(1):
        draft = path.with_name(f"{path.name}#{number}")
        with contextlib.suppress(FileExistsError):
            return io.FileIO(draft, "xb"), draft
    raise AssertionError("there is always another number")


def drafts(folder: Path) -> list[Path]:
    """Return the draft files below a folder, including the drafts of obstore.

    A draft is either being written, or was left by a process that was killed.
    """
    paths = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    return [path for path in paths if _DRAFT.fullmatch(path.name)]


def drop(draft: Path, top: Path) -> None:
    """Delete a draft, and then the folders below `top` that have become empty.

    Raises:
        OSError: When the draft can't be deleted.
    """
    draft.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder is not empty
        for folder in itertools.takewhile(lambda folder: folder != top, draft.parents):
            folder.rmdir()
