"""Reader of NumPy files as records: the array of an .npy file, or the named arrays of an .npz file.

NumPy's own reader allocates as much memory as a file's header requests, and reads headers of up to 4 GiB. This reader
checks each size in a file first, because the file may be damaged.

The value of an .npy file has the name `features`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.content import HEAD_BYTES, container_of
from concertina_trainer.data.build.records import MOST_BYTES, Record, UnreadArray

_NPY, _ZIP = "a NumPy array", "a zip archive"
"""Names that `content.container_of` returns for .npy and .npz files."""
_MOST_HEADER_BYTES = 16384
"""Maximum size of a header in bytes. NumPy itself refuses headers of more than 10,000 bytes."""
_MOST_DESCRIBED = 20
"""Maximum number of arrays that an error message describes."""
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
"""Reader of the header, keyed by the version of the format.

Version 3 is not listed, because it is only for records with named parts.
"""
DAMAGE = (
    ValueError, TypeError, SyntaxError, RuntimeError, OverflowError, EOFError, OSError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""Errors that NumPy and zipfile raise about a file's content."""


def read_arrays(location: str, file: IO[bytes], columns: Collection[str]) -> Iterator[Record]:
    """Yield the only record of a file. Of an .npz file, only the arrays `columns` are read.

    Raises:
        InvalidInput: When the file can't be read, or has an array of objects.
    """
    try:
        values = _values(file, columns)
    except DAMAGE as error:
        raise InvalidInput(f"{location} can't be read: {str(error)[:300].rstrip('.')}.") from error
    yield Record(values, functools.partial(str, location))


def _values(file: IO[bytes], columns: Collection[str]) -> dict[str, object]:
    """Return the arrays of a file, keyed by name.

    Raises:
        ValueError: When the file has another format.
    """
    container = container_of(file.read(HEAD_BYTES))
    file.seek(0)
    if container == _ZIP:
        return _archive(file, columns)
    if container not in ("", _NPY):
        raise ValueError(f"it holds {container}")
    return {"features": load(file)}


def load(file: IO[bytes]) -> NDArray[Any]:
    """Read the array of an .npy file.

    Raises:
        ValueError: When the file is damaged, or its array has elements other than numbers or more than MOST_BYTES
            bytes.
    """
    shape, is_fortran, dtype, rest = _header(file)
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise ValueError(f"its array has {size} bytes, and at most {MOST_BYTES} are read: divide it into documents")
    content = rest + file.read(max(0, size - len(rest)))
    if len(content) < size:
        raise ValueError(f"it is cut off: its array has {size} bytes, and {len(content)} are there")
    if len(content) > size or file.read(1):
        raise ValueError("it continues after its array: write one array to each file")
    return np.ndarray(shape, dtype, content, order="F" if is_fortran else "C")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], bytes]:
    """Return an array's shape, whether it is in Fortran order, its dtype, and the bytes read beyond the header.

    Raises:
        ValueError: When the array has elements other than numbers.
    """
    start = io.BytesIO(file.read(_MOST_HEADER_BYTES))
    read = _HEADERS.get(npy.read_magic(start))
    if read is None:
        raise ValueError("it is not an array of numbers")
    try:
        shape, is_fortran, dtype = read(start)
    except MemoryError as error:  # Python's parser raises it for an expression that is nested too deeply
        raise ValueError("its header can't be read") from error
    if dtype.hasobject or not dtype.itemsize or not shape or min(shape) < 0:
        raise ValueError("it is not an array of numbers")
    return shape, is_fortran, dtype, start.read()


def _archive(file: IO[bytes], columns: Collection[str]) -> dict[str, object]:
    """Return the arrays of an .npz file, keyed by name. The value of an array that is not in `columns` is None.

    If a column is missing, the shapes of the other arrays are read too, for the error message. Members that are not
    arrays of numbers have no shape.

    Raises:
        ValueError: When two arrays have the same name, or an array can't be read.
    """
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("it has two arrays of the same name")
        values: dict[str, object] = dict.fromkeys(members)
        for name in filter(members.__contains__, columns):
            with archive.open(members[name]) as member:
                values[name] = load(member)
        if not members.keys() >= set(columns):
            for name in [name for name in members if values[name] is None][:_MOST_DESCRIBED]:
                with contextlib.suppress(*DAMAGE), archive.open(members[name]) as member:
                    shape, _, dtype, _ = _header(member)
                    values[name] = UnreadArray(shape, dtype)
        return values
