"""Reads of a saved state: they are planned beforehand, each wanted element once, and only elements that exist."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_protocol import SnapshotId
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box, reads
from concertina_state.format.shardfile import ITEM_SIZES, Chunk, Layout, ShardMetadata, header_length, parse_header


@st.composite
def grids(draw, shape):
    """Generate a tensor that is cut into boxes as by some world."""
    edges = [draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set() for length in shape]
    cuts = [
        [(begin, end - begin) for begin, end in pairwise((0, *sorted(some), length))]
        for some, length in zip(edges, shape, strict=True)
    ]
    return [tuple(zip(*box, strict=True)) if box else ((), ()) for box in product(*cuts)]


@st.composite
def worlds(draw):
    """Generate tensors by name: dtype, shape, the saved boxes, and the wanted ones.

    Several shards may hold the same saved box.
    """
    found = {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        saved = draw(grids(shape)) * draw(st.integers(1, 2))
        found[f"t{number}"] = (draw(st.sampled_from(sorted(ITEM_SIZES))), shape, saved, draw(grids(shape)))
    return found, draw(st.integers(1, 4))


def files(tensors, count):
    """Yield the shards of `count` ranks, with each box in one of them: content and header by number.

    A rank can hold one box of a tensor, so there are more ranks if there are more boxes.
    """
    chunks = {}
    for name, (dtype, shape, saved, _) in tensors.items():
        for index, (offsets, lengths) in enumerate(saved):
            chunks.setdefault(index if len(saved) > count else index % count, []).append(
                Chunk(name, dtype, offsets, lengths, shape)
            )
    for number, some in sorted(chunks.items()):
        layout = Layout(some)
        content = layout.header(ShardMetadata(SnapshotId(1, 2, "l", len(chunks)), number, 0, "", ""))
        for chunk in layout.chunks:
            box = Box.of(chunk)
            content += values(chunk)[box.within(Box((0,) * len(chunk.global_shape), chunk.global_shape))].tobytes()
        yield number, content, parse_header(content[8 : header_length(content[:8])])


def values(chunk):
    """Return the whole tensor as bytes `[..., item size]`, in which every element contains its position."""
    size = ITEM_SIZES[chunk.dtype]
    count = math.prod(chunk.global_shape)
    numbers = (np.arange(count, dtype="<u8")[:, None] >> (8 * np.arange(size, dtype="<u8"))).astype(np.uint8)
    return numbers.reshape(*chunk.global_shape, size)


@settings(max_examples=100, deadline=None)
@given(worlds(), st.sampled_from([1, 7, 16, 1 << 20]))
def test_every_wanted_element_is_read_once_and_only_what_is_there(world, most):
    tensors, count = world
    found = list(files(tensors, count))
    contents = {number: content for number, content, _ in found}
    held = {number: header for number, _, header in found}
    for name, (dtype, shape, _, targets) in tensors.items():
        for offsets, lengths in targets:
            wanted = Chunk(name, dtype, offsets, lengths, shape)
            plan = reads(held, [wanted])
            assert not plan.lacking
            times, out = np.zeros(lengths, int), np.zeros((*lengths, ITEM_SIZES[dtype]), np.uint8)
            for shard in plan.shards:
                for batch in plan.batches(shard, most):
                    assert len({item.begin // most for item in batch}) == 1
                    for item in batch:
                        stored = held[shard].chunks[name]
                        assert stored.begin <= item.begin < item.begin + item.size <= stored.begin + stored.chunk.size
                        data = np.frombuffer(contents[shard][item.begin : item.begin + item.size], np.uint8)
                        rows = data.reshape(*item.rows.shape, ITEM_SIZES[dtype])
                        out[item.box.within(Box.of(wanted))] = rows[item.box.within(item.rows)]
                        times[item.box.within(Box.of(wanted))] += 1
            assert (times == 1).all()
            assert (out == values(wanted)[Box.of(wanted).within(Box((0,) * len(shape), shape))]).all()


@settings(max_examples=50, deadline=None)
@given(worlds(), st.data())
def test_what_no_shard_has_is_said_and_nothing_else(world, data):
    tensors, count = world
    held = {number: header for number, _, header in files(tensors, count)}
    lost = data.draw(st.sampled_from(sorted(held)))
    without = {number: header for number, header in held.items() if number != lost}
    for name, (dtype, shape, _, targets) in tensors.items():
        there = np.zeros(shape, bool)
        for header in without.values():
            if name in header.chunks:
                there[Box.of(header.chunks[name].chunk).within(Box((0,) * len(shape), shape))] = True
        for offsets, lengths in targets:
            wanted = Chunk(name, dtype, offsets, lengths, shape)
            plan, inside = reads(without, [wanted]), Box.of(wanted).within(Box((0,) * len(shape), shape))
            lacking = np.zeros(lengths, int)
            for chunk, box in plan.lacking:
                assert chunk == wanted
                lacking[box.within(Box.of(wanted))] += 1
            assert (lacking == ~there[inside]).all()


def test_the_sentence_names_the_tensor_and_what_of_it_is_lacking():
    saved, wanted = Chunk("w", "F32", (0, 0), (4, 3), (6, 3)), Chunk("w", "F32", (2, 0), (4, 3), (6, 3))
    header = parse_header(Layout([saved]).header(ShardMetadata(SnapshotId(1, 2, "l", 1), 0, 0, "", ""))[8:])
    with pytest.raises(
        InvalidInput, match=r"w is incomplete in x: no shard contains its elements from \[4, 0\] to \[6, 3\]"
    ):
        reads({0: header}, [wanted]).require("x")
