"""JAX: its arrays in a dict, and how its processes agree: `State(arrays=kept, gather=trainingjob.jax.gather)`."""

from __future__ import annotations

from typing import Any

import jax
import numpy
from jax.experimental import multihost_utils

from concertina_state.errors import BadInput
from concertina_state.holdings import ArrayShard
from trainingjob._arrays import Leaf, numpy_buffer

__all__ = ["gather"]


def gather(data: bytes) -> list[bytes]:
    """What all processes give, in their order: after `jax.distributed.initialize`."""
    own = numpy.frombuffer(data, numpy.uint8)
    sizes = multihost_utils.process_allgather(numpy.array([len(own)], numpy.int32)).reshape(-1)
    padded = numpy.zeros(max(1, int(sizes.max())), numpy.uint8)  # all have to give as much
    padded[: len(own)] = own
    rows = numpy.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def leaf_of(value: jax.Array) -> Leaf:
    """A copy, as JAX's arrays can't be written to; what was filled becomes an array that is placed as this one."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        inner, kind = leaf_of(jax.random.key_data(value)), jax.random.key_impl(value)
        return Leaf(inner.array, lambda: jax.random.wrap_key_data(inner.filled(), impl=kind), inner.whole)
    if value.is_fully_addressable or value.is_fully_replicated:
        copy, offsets = numpy.array(value), (0,) * value.ndim
        return Leaf(numpy_buffer(copy), lambda: _placed(value, copy, offsets))
    copy, offsets = _box(value)
    part = ArrayShard(numpy_buffer(copy), offsets, value.shape)
    return Leaf(part, lambda: _placed(value, copy, offsets), whole=False)


def _placed(like: jax.Array, content: Any, offsets: tuple[int, ...]) -> jax.Array:
    """`content`: of the array, from `offsets` on."""

    def shard(index: tuple[slice, ...]) -> Any:
        found = [(each.indices(length)[:2], o) for each, length, o in zip(index, like.shape, offsets, strict=True)]
        return content[tuple(slice(begin - o, end - o) for (begin, end), o in found)]

    return jax.make_array_from_callback(like.shape, like.sharding, shard)


def _box(value: jax.Array) -> tuple[Any, tuple[int, ...]]:
    """What this process has of an array that is cut over several, as one box, and where that begins."""
    bounds = [
        tuple(each.indices(length)[:2] for each, length in zip(shard.index, value.shape, strict=True))
        for shard in value.addressable_shards
    ]
    begins = tuple(min(begin for begin, _ in axis) for axis in zip(*bounds, strict=True))
    ends = tuple(max(end for _, end in axis) for axis in zip(*bounds, strict=True))
    copy = numpy.empty([end - begin for begin, end in zip(begins, ends, strict=True)], value.dtype)
    seen = numpy.zeros(copy.shape, bool)
    for shard, each in zip(value.addressable_shards, bounds, strict=True):
        place = tuple(slice(begin - o, end - o) for (begin, end), o in zip(each, begins, strict=True))
        copy[place], seen[place] = numpy.asarray(shard.data), True
    if not seen.all():
        raise BadInput(
            f"what this process has of an array {list(value.shape)} is no single box: place it so that neighbours of a "
            "mesh are devices of one process."
        )
    return copy, begins
