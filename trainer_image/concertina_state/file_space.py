"""Space for a shard file, allocated before the file is written.

All pages of the file are allocated and mapped before a byte is written. A full volume is therefore an error, and not a
SIGBUS later.
"""

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
"""Seconds to wait for free space after the free space last grew."""
PIECE = 32 << 20
"""Bytes to allocate or advise at a time.

Mapping pages locks the process's memory map, for which other allocations wait. Between two pieces another thread can
also get the GIL.
"""
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23
_madvise = ctypes.CDLL(None).madvise
"""madvise(2) through ctypes, because the method of `mmap` keeps the GIL."""
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Spare:
    """File that was allocated ahead of its use.

    It has no name yet, so its memory is freed with the object that holds it, or with the process.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Allocate and map an unnamed file of `size` bytes.

        A peer's copy may need space sooner than this file is needed. Allocation therefore also fails where the volume
        would not have as much space again (decision "Room for the next snapshot is made beside training").

        Raises:
            OSError: When there is not enough space, or the file system has no unnamed files.
        """
        self._descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        for begin in range(0, size, PIECE):
            volume = os.fstatvfs(self._descriptor)
            if volume.f_bavail * volume.f_frsize < size - begin + size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._descriptor, begin, min(PIECE, size - begin))
        self._map = _mapped(self._descriptor, size)

    def named(self, path: Path) -> mmap.mmap:
        """Link the file at `path`, in the place of whatever is there, and return its mapping.

        Raises:
            OSError: When the file can't be linked.
        """
        draft = _no_draft(path)
        # With a descriptor of a folder, though the path needs none, Python follows the link.
        os.link(f"/proc/self/fd/{self._descriptor}", draft, src_dir_fd=self._descriptor)
        self._close()
        _put(draft, path)
        return self._map


def spare(folder: Path, size: int) -> Spare | None:
    """Return a spare file, or None if it can't be allocated.

    A caller that needs a file allocates it then, and reports the error.
    """
    try:
        return Spare(folder, size)
    except OSError:
        return None


def map_new(path: Path, size: int, spare: Spare | None = None) -> mmap.mmap:
    """Map a new file in the place of whatever is at `path`: the spare one, or one that is allocated now.

    Raises:
        InvalidInput: When the volume is too small.
        RestoreFailed: When there is no space beside the snapshots of the previous round.
    """
    if spare is not None:
        with contextlib.suppress(OSError):  # there is no /proc, or the file system can't link an unnamed file
            return spare.named(path)
    draft = _no_draft(path)
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _allocate(descriptor, size)
        mapped = _mapped(descriptor, size)
    except OSError as error:
        draft.unlink(missing_ok=True)
        failure = _no_room(path, size, error)
        raise failure from error
    finally:
        os.close(descriptor)
    _put(draft, path)
    return mapped


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, size)
    _advise(mapped, _MADV_POPULATE_WRITE)  # an old kernel refuses, and the pages are faulted in one by one
    return mapped


def unmap(mapped: mmap.mmap) -> None:
    """Unmap the pages of a file, whose contents stay.

    Dropping the last reference to a mapping unmaps it too, but keeps the GIL meanwhile.
    """
    _advise(mapped, _MADV_DONTNEED)


def _advise(mapped: mmap.mmap, advice: int) -> None:
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
    for begin in range(0, size, PIECE):
        _madvise(address + begin, min(PIECE, size - begin), advice)


def _no_draft(path: Path) -> Path:
    """Return the path at which a file is prepared before it replaces `path`, after removing an earlier draft."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    return draft


def _put(draft: Path, path: Path) -> None:
    remove_sidecar(path)
    draft.replace(path)


def _no_room(path: Path, size: int, error: OSError) -> Exception:
    """Return the error for a lack of space for the file at `path`.

    `path` is <volume>/snapshots/round-<r>/shard-<k>/slot-<n>. If snapshots of the previous round also take space, the
    job can continue from durable storage, which makes them void. Otherwise more space is the only remedy.
    """
    problem = f"no room for a snapshot of {size / 2**20:.0f} MiB in {path.parent} ({error.strerror})"
    advice = "Raise its size and the pod's memory, or use more replicas."
    snapshots, own_round = path.parents[2], path.parents[1].name
    rounds = {round.name for kind in ("snapshots", "copies") for round in (snapshots.parent / kind).glob("round-*")}
    if rounds - {own_round}:
        return RestoreFailed(f"{problem} beside those of the round before, which are still needed. {advice}")
    return InvalidInput(
        f"{problem}: the replica's memory volume is too small for three of them and a peer's copy. {advice}"
    )


def _allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes, waiting for space as long as free space keeps growing.

    A full volume is not an error at first. The agent may be freeing the memory of an older round, and the more there
    is, the longer that takes.

    Raises:
        OSError: When free space has not grown for ROOM_SECONDS, or allocation fails for another reason.
    """
    most_room, deadline = -1, 0.0
    while True:
        try:
            return os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            room = os.fstatvfs(descriptor).f_bavail
            if room > most_room:
                most_room, deadline = room, time.monotonic() + ROOM_SECONDS
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise
        time.sleep(0.05)
