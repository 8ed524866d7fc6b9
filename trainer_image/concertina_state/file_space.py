"""Room for a shard file: all its pages are allocated and mapped before a byte is written, so that a full volume is an
error and not a SIGBUS later."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
import weakref
from pathlib import Path

from concertina_protocol.sidecar import remove_sidecar
from concertina_state.errors import InvalidInput, RestoreFailed

ROOM_SECONDS = 10.0
"""Since there was last more of it."""
PIECE = 32 << 20
"""Bytes at a time: mapping pages keeps the process's memory map, in which others' allocations wait; and between two
pieces Python's lock may be waited for."""
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23
_madvise = ctypes.CDLL(None).madvise
"""mmap's own method keeps Python's lock."""
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Spare:
    """A file that was made ahead. It has no name yet, so its memory goes with whoever holds it, or with the process."""

    def __init__(self, folder: Path, size: int) -> None:
        """Raises OSError; also where there would not be as much room again, which a peer's copy may need sooner than
        this is wanted (decision "Room for the next snapshot is made beside training")."""
        self._descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        for begin in range(0, size, PIECE):
            volume = os.fstatvfs(self._descriptor)
            if volume.f_bavail * volume.f_frsize < size - begin + size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._descriptor, begin, min(PIECE, size - begin))
        self._map = _mapped(self._descriptor, size)

    def named(self, path: Path) -> mmap.mmap:
        """From now on it is the file at `path`. Raises OSError."""
        draft = _no_draft(path)
        # With a descriptor of a folder, though the path needs none, Python follows the link.
        os.link(f"/proc/self/fd/{self._descriptor}", draft, src_dir_fd=self._descriptor)
        self._close()
        _put(draft, path)
        return self._map


def spare(folder: Path, size: int) -> Spare | None:
    """None where it can't be: whoever needs a file makes it then, and says what is wrong."""
    try:
        return Spare(folder, size)
    except OSError:
        return None


def map_new(path: Path, size: int, spare: Spare | None = None) -> mmap.mmap:
    """A new file in the place of whatever is there: the spare one, or one that is made now. Raises InvalidInput or
    RestoreFailed where there is no room."""
    if spare is not None:
        with contextlib.suppress(OSError):  # /proc is not there, or a file system gives no name later
            return spare.named(path)
    draft = _no_draft(path)
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _allocate(descriptor, size)
        mapped = _mapped(descriptor, size)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _no_room(path, size, error) from error
    finally:
        os.close(descriptor)
    _put(draft, path)
    return mapped


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, size)
    _advise(mapped, _MADV_POPULATE_WRITE)  # an old kernel refuses: the pages are faulted in one by one
    return mapped


def unmap(mapped: mmap.mmap) -> None:
    """What is in the file stays. Whoever holds the last name of a mapping unmaps it, but keeps Python's lock for it."""
    _advise(mapped, _MADV_DONTNEED)


def _advise(mapped: mmap.mmap, advice: int) -> None:
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
    for begin in range(0, size, PIECE):
        _madvise(address + begin, min(PIECE, size - begin), advice)


def _no_draft(path: Path) -> Path:
    """Where a file waits for its place."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    return draft


def _put(draft: Path, path: Path) -> None:
    remove_sidecar(path)
    draft.replace(path)


def _no_room(path: Path, size: int, error: OSError) -> Exception:
    """`path` is <volume>/snapshots/round-<r>/shard-<k>/slot-<n>. Where those of the round before take room too,
    going on from durable storage, which makes them void, is a way out; else there is none."""
    problem = f"no room for a snapshot of {size / 2**20:.0f} MiB in {path.parent} ({error.strerror})"
    advice = "Raise its size and the pod's memory, or use more replicas."
    snapshots, mine = path.parents[2], path.parents[1].name
    rounds = {other.name for kind in ("snapshots", "copies") for other in (snapshots.parent / kind).glob("round-*")}
    if rounds - {mine}:
        return RestoreFailed(f"{problem} beside those of the round before, which are still needed. {advice}")
    return InvalidInput(
        f"{problem}: the replica's memory volume is too small for three of them and a peer's copy. {advice}"
    )


def _allocate(descriptor: int, size: int) -> None:
    """Raises OSError. A full volume is none at first: the agent may be giving back the memory of an older round, which
    takes as long as there is much of it; so it is waited for while there is ever more room."""
    most, deadline = -1, 0.0
    while True:
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            room = os.fstatvfs(descriptor).f_bavail
            if room > most:
                most, deadline = room, time.monotonic() + ROOM_SECONDS
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise
        time.sleep(0.05)
