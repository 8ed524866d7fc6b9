"""Records of NumPy files: the array of an .npy file is the value `features`, and those of an .npz file have names."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.content import container_of
from concertina_trainer.data.build.records import Record

_OWN_CONTAINERS = ("a NumPy array", "a zip archive")
"""Names of the file formats that .npy and .npz files have, as found by `content.container_of`."""


def read_arrays(location: str, file: BinaryIO) -> Iterator[Record]:
    """Yield the one record of a file.

    Raises:
        InvalidInput: When the file can't be read, or has an array of objects.
    """
    whole = file.read()
    try:
        loaded = np.load(io.BytesIO(whole), allow_pickle=False)
        values = {"features": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded}
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{location} can't be read: {_why_unreadable(whole, error)}.") from error
    yield Record(values, functools.partial(str, location))


def _why_unreadable(whole: bytes, error: Exception) -> str:
    container = container_of(whole)
    if container and container not in _OWN_CONTAINERS:
        return f"it holds {container}"
    if "pickle" in str(error):  # NumPy's own message advises to allow pickle, which would run code from the file
        return "it is not an array of numbers"
    return str(error)[:300].rstrip(".")
