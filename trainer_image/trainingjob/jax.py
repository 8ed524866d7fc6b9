"""JAX arrays in the dicts of a `State`, and the exchange of bytes between JAX's processes.

Example::

    import trainingjob.jax

    state = trainingjob.State(arrays=arrays, gather=trainingjob.jax.gather)
"""

from __future__ import annotations

from typing import Any

import jax
import numpy
from jax.experimental import multihost_utils

from concertina_state.errors import InvalidInput
from concertina_state.holdings import ArrayShard
from trainingjob._leaf import Leaf, numpy_buffer

__all__ = ["gather"]


def gather(data: bytes) -> list[bytes]:
    """Return the bytes of all processes. Pass this function to `State(gather=...)`.

    Call `jax.distributed.initialize` first, and this function on all processes.

    Args:
        data: The bytes of this process.

    Returns:
        The bytes of every process, in the order of the processes.
    """
    own = numpy.frombuffer(data, numpy.uint8)
    sizes = multihost_utils.process_allgather(numpy.array([len(own)], numpy.int32)).reshape(-1)
    padded = numpy.zeros(max(1, int(sizes.max())), numpy.uint8)  # all processes must give the same number of bytes
    padded[: len(own)] = own
    rows = numpy.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes)]


def leaf_of(value: jax.Array) -> Leaf:
    """Return the leaf of a JAX array. The leaf holds a copy, because a JAX array can't be written to.

    After the copy has been filled in a restore, it becomes a new array with the same sharding.

    Raises:
        InvalidInput: The array is distributed, and this process's part is not one box (rectangular part).
    """
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        inner, kind = leaf_of(jax.random.key_data(value)), jax.random.key_impl(value)
        return Leaf(inner.array, lambda: jax.random.wrap_key_data(inner.filled(), impl=kind), inner.whole)
    if value.is_fully_addressable or value.is_fully_replicated:
        copy, offsets = numpy.array(value), (0,) * value.ndim
        return Leaf(numpy_buffer(copy), lambda: _placed(value, copy, offsets))
    copy, offsets = _box(value)
    shard = ArrayShard(numpy_buffer(copy), offsets, value.shape)
    return Leaf(shard, lambda: _placed(value, copy, offsets), whole=False)


def _placed(like: jax.Array, content: Any, offsets: tuple[int, ...]) -> jax.Array:
    """Return an array with the sharding of `like`, given this process's part `content` and its offsets in the array."""

    def shard(index: tuple[slice, ...]) -> Any:
        bounds = [axis.indices(length)[:2] for axis, length in zip(index, like.shape)]
        return content[tuple(slice(begin - o, end - o) for (begin, end), o in zip(bounds, offsets))]

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def _box(value: jax.Array) -> tuple[Any, tuple[int, ...]]:
    """Copy this process's part of a distributed array.

    Returns:
        A numpy array with the part, and the offsets of its first element in the global array.

    Raises:
        InvalidInput: The part is not one box (rectangular part) of the array.
    """
    bounds = [
        tuple(axis.indices(length)[:2] for axis, length in zip(shard.index, value.shape))
        for shard in value.addressable_shards
    ]
    begins = tuple(min(begin for begin, _ in axis) for axis in zip(*bounds))
    ends = tuple(max(end for _, end in axis) for axis in zip(*bounds))
    copy = numpy.empty([end - begin for begin, end in zip(begins, ends)], value.dtype)
    covered = numpy.zeros(copy.shape, bool)
    for shard, axes in zip(value.addressable_shards, bounds):
        place = tuple(slice(begin - o, end - o) for (begin, end), o in zip(axes, begins))
        copy[place], covered[place] = numpy.asarray(shard.data), True
    if not covered.all():
        raise InvalidInput(
            f"this process's part of an array {list(value.shape)} is not a single box: choose a sharding in "
            "which neighbors in the mesh are devices of one process."
        )
    return copy, begins
