"""Which values of a script's dict are arrays, and their memory: torch's, numpy's, JAX's, and the standard library's.
None of these libraries is imported here: where a script has an array, it has its library."""

from __future__ import annotations

import array
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from concertina_state.buffers import DTYPES, Buffer
from concertina_state.holdings import ArrayShard

FORMATS = {
    "d": "F64", "f": "F32", "e": "F16", "b": "I8", "B": "U8", "?": "BOOL",
    **{f: f"I{8 * array.array(f).itemsize}" for f in "hilq"}, **{f: f"U{8 * array.array(f).itemsize}" for f in "HILQ"},
}  # fmt: skip
"""Of the standard library's buffers."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    array: Any
    """A tensor, a Buffer, or an ArrayShard of one: itself, or a copy where it is read-only."""
    filled: Callable[[], Any]
    """Once that has been filled: what stands in the value's place."""
    whole: bool = True
    """It is all of the array, so each rank has to have the same."""


def is_array(value: Any) -> bool:
    """Small arrays that can't be written to are values."""
    if isinstance(value, ArrayShard):
        return True
    if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
        return True
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
        return bool(value.flags.writeable) and value.dtype.name in DTYPES
    if (jax := sys.modules.get("jax")) and isinstance(value, jax.Array):
        return True
    if isinstance(value, (array.array, memoryview)):
        view = memoryview(value)
        return not view.readonly and view.c_contiguous and view.format in FORMATS
    return False


def leaf(value: Any) -> Leaf:
    """Of what is an array."""
    if isinstance(value, ArrayShard):
        inner = leaf(value.array)
        part = dataclasses.replace(value, array=inner.array)
        return Leaf(part, lambda: dataclasses.replace(value, array=inner.filled()), whole=False)
    if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
        return Leaf(value, lambda: value, whole=not hasattr(value, "_local_tensor"))  # DTensors say how they are cut
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
        return _of_numpy(value)
    if (jax := sys.modules.get("jax")) and isinstance(value, jax.Array):
        from trainingjob.jax import leaf_of

        return leaf_of(value)
    view = memoryview(value)
    bytes_ = view.cast("B") if view.nbytes else memoryview(b"")  # nothing can't be cast
    return Leaf(Buffer(FORMATS[view.format], tuple(view.shape or ()), bytes_), lambda: value)


def _of_numpy(value: Any) -> Leaf:
    if value.flags.c_contiguous and value.dtype.isnative:
        return Leaf(numpy_buffer(value), lambda: value)
    copy = value.astype(value.dtype.newbyteorder("="), order="C")

    def filled() -> Any:
        value[...] = copy
        return value

    return Leaf(numpy_buffer(copy), filled)


def numpy_buffer(value: Any) -> Buffer:
    """Of an array without gaps."""
    import numpy

    bytes_: Any = numpy.asarray(value).reshape(-1).view(numpy.uint8)
    return Buffer(DTYPES[value.dtype.name], tuple(value.shape), memoryview(bytes_))
