"""Arrays of torch, numpy, JAX and the standard library in a dict that a script gives to `State`, and their bytes.

None of these libraries is imported here: if a script has an array, it has imported the array's library.
"""

from __future__ import annotations

import array
import dataclasses
import sys
from typing import Any

from concertina_state.buffers import DTYPES, Buffer
from concertina_state.holdings import ArrayShard
from trainingjob._leaf import FORMATS, Leaf, numpy_leaf


def is_array(value: Any) -> bool:
    """Return whether a value is saved as an array. A small read-only array is saved as a plain value instead."""
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
    """Return the `Leaf` of an array, which gives access to the array's memory. `is_array(value)` must be true."""
    if isinstance(value, ArrayShard):
        inner = leaf(value.array)
        shard = dataclasses.replace(value, array=inner.array)
        return Leaf(shard, lambda: dataclasses.replace(value, array=inner.filled()), whole=False)
    if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
        return Leaf(value, lambda: value, whole=not hasattr(value, "_local_tensor"))  # a DTensor says how it is cut
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
        return numpy_leaf(value)
    if (jax := sys.modules.get("jax")) and isinstance(value, jax.Array):
        from trainingjob.jax import leaf_of

        return leaf_of(value)
    view = memoryview(value)
    bytes_ = view.cast("B") if view.nbytes else memoryview(b"")  # an empty view can't be cast
    return Leaf(Buffer(FORMATS[view.format], tuple(view.shape or ()), bytes_), lambda: value)
