"""Allocation of space for a shard file before the file is written.

All pages of the file are allocated and mapped before the first byte is written. A full volume therefore causes an error
at this point, instead of a SIGBUS during the write.
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
"""Seconds to wait for more free space in a full volume, counted anew each time that free space has grown."""
PIECE = 32 << 20
"""Number of bytes per system call, for allocation and for advice to the kernel.

While the kernel maps pages, it locks the process's memory map, and other allocations wait for that lock. Between two
calls, these allocations can continue, and another thread can take the GIL.
"""
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23
_madvise = ctypes.CDLL(None).madvise
"""madvise(2) called through ctypes, because `mmap.madvise` holds the GIL."""
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Spare:
    """File whose space is allocated in advance, for the next snapshot.

    The file has no name yet. Its memory is freed when this object is destroyed or the process ends.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Allocate and map an unnamed file of `size` bytes.

        The volume must also have space for another `size` bytes, because the agent may need that space first, for its
        copy of another replica's shard (decision "A thread allocates the next snapshot's file").

        Raises:
            OSError: When there is not enough space, or the file system does not support unnamed files.
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
        """Give the file the name `path`, replacing any file of that name, and return the file's mapping.

        Raises:
            OSError: When the file can't be linked.
        """
        draft = _no_draft(path)
        # Python follows the link only if a folder's descriptor is passed, although the path does not need one.
        os.link(f"/proc/self/fd/{self._descriptor}", draft, src_dir_fd=self._descriptor)
        self._close()
        _put(draft, path)
        return self._map


def spare(folder: Path, size: int) -> Spare | None:
    """Return a file of `size` bytes that is allocated in advance, or None if there is not enough space for it.

    If the result is None, the caller allocates the file when it needs it. An error is reported only then.
    """
    try:
        return Spare(folder, size)
    except OSError:
        return None


def map_new(path: Path, size: int, spare: Spare | None = None) -> mmap.mmap:
    """Map a new file at `path`, in place of any file there, and return the mapping.

    The new file is `spare`, whose space was allocated earlier, or a file that is allocated now.

    Raises:
        InvalidInput: When the volume is too small.
        RestoreFailed: When the snapshots of the previous round take so much space that there is none for the file.
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
    _advise(mapped, _MADV_POPULATE_WRITE)  # an old kernel refuses this; pages are then mapped at the first access
    return mapped


def unmap(mapped: mmap.mmap) -> None:
    """Unmap a file's pages from this process's memory. The file keeps its contents.

    Deleting the last reference to the mapping would unmap the file too, but would block other threads by the GIL.
    """
    _advise(mapped, _MADV_DONTNEED)


def _advise(mapped: mmap.mmap, advice: int) -> None:
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
    for begin in range(0, size, PIECE):
        _madvise(address + begin, min(PIECE, size - begin), advice)


def _no_draft(path: Path) -> Path:
    """Return the path at which to create a temporary file that will replace `path`.

    A temporary file of an earlier attempt is deleted.
    """
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    return draft


def _put(draft: Path, path: Path) -> None:
    remove_sidecar(path)
    draft.replace(path)


def _no_room(path: Path, size: int, error: OSError) -> Exception:
    """Return the error to raise if there is no space for the file at `path`.

    `path` is <volume>/snapshots/round-<r>/shard-<k>/slot-<n>. If snapshots of the previous round take space too, the
    error is RestoreFailed: the next round then restores from durable storage, and these snapshots are deleted.
    Otherwise the error is InvalidInput, because only a larger volume helps.
    """
    problem = f"no room for a snapshot of {size / 2**20:.0f} MiB in {path.parent} ({error.strerror})"
    advice = "Increase the size of the memory volume and the pod's memory, or use more replicas."
    snapshots, own_round = path.parents[2], path.parents[1].name
    rounds = {round.name for kind in ("snapshots", "copies") for round in (snapshots.parent / kind).glob("round-*")}
    if rounds - {own_round}:
        return RestoreFailed(f"{problem}, because the snapshots of the previous round are still needed. {advice}")
    return InvalidInput(
        f"{problem}: the replica's memory volume is too small for three snapshots and the copy of a peer's "
        f"snapshot. {advice}"
    )


def _allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes for a file. If the volume is full, wait as long as its free space keeps growing.

    Free space may grow because the agent is still freeing the memory of an older round.

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
