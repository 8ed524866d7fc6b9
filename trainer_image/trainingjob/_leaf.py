"""One array in a script's dict: the array's memory, and the value to put into the dict after a restore."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable
from typing import Any

from concertina_state.buffers import DTYPES, Buffer

FORMATS = {
    "d": "F64", "f": "F32", "e": "F16", "b": "I8", "B": "U8", "?": "BOOL",
    **{f: f"I{8 * array.array(f).itemsize}" for f in "hilq"}, **{f: f"U{8 * array.array(f).itemsize}" for f in "HILQ"},
}  # fmt: skip
"""Names of dtypes in safetensors, keyed by the format letter of a buffer in Python's `struct` notation."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Array in a dict, list or tuple of a script."""

    array: Any
    """A tensor, a Buffer, or an ArrayShard of one: the value itself, or a copy if the value can't be written to."""
    filled: Callable[[], Any]
    """Returns the value to put into the dict in the array's place, once the array has been filled."""
    whole: bool = True
    """True if this is the whole global array, so that every rank must hold the same content."""


def numpy_leaf(value: Any) -> Leaf:
    """Return the leaf of a numpy array.

    If the array is not contiguous or not in native byte order, the leaf has a copy of it.
    """
    if value.flags.c_contiguous and value.dtype.isnative:
        return Leaf(numpy_buffer(value), lambda: value)
    copy = value.astype(value.dtype.newbyteorder("="), order="C")

    def filled() -> Any:
        value[...] = copy
        return value

    return Leaf(numpy_buffer(copy), filled)


def numpy_buffer(value: Any) -> Buffer:
    """Return the memory of a contiguous numpy array as a Buffer."""
    import numpy

    bytes_: Any = numpy.asarray(value).reshape(-1).view(numpy.uint8)
    return Buffer(DTYPES[value.dtype.name], tuple(value.shape), memoryview(bytes_))
