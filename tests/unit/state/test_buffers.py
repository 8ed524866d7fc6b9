"""Plain memory is filled from shards with any division of either: in place if the bytes are contiguous."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_protocol import SnapshotId
from concertina_state.buffers import Buffer, BufferCatalogue
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.holdings import ArrayShard
from concertina_state.saved import LocalShard

SHAPE = (5, 4, 3)


def spans(length):
    """Generate ranges [begin, end)."""
    return st.tuples(st.integers(0, length - 1), st.integers(1, length)).filter(lambda span: span[0] < span[1])


BOXES = st.tuples(*map(spans, SHAPE))
CUTS = st.tuples(*(st.sets(st.integers(1, n - 1), max_size=2).map(lambda s, n=n: (0, *sorted(s), n)) for n in SHAPE))


def buffer(array):
    return Buffer({4: "F32", 2: "U16"}[array.itemsize], array.shape, memoryview(array.reshape(-1).view(np.uint8)))


def within(box):
    return tuple(slice(*span) for span in box)


def write(path, whole, box):
    offsets, shape = [begin for begin, _ in box], tuple(end - begin for begin, end in box)
    id = SnapshotId(1, 5, "digest", 1)
    layout = Layout([Chunk("w", "F32", tuple(offsets), shape, SHAPE)])
    path.write_bytes(layout.header(ShardMetadata(id, 0, 0, "", "")) + whole[within(box)].tobytes())
    return LocalShard(path, id)


@settings(max_examples=150, deadline=None)
@given(CUTS, BOXES)
def test_any_box_from_any_cut(tmp_path_factory, cuts, box):
    folder = tmp_path_factory.mktemp("shards")
    whole = np.arange(60, dtype=np.float32).reshape(SHAPE)
    grid = itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    shards = {number: write(folder / f"shard-{number}", whole, each) for number, each in enumerate(grid)}
    mine = np.full([end - begin for begin, end in box], -1.0, np.float32)
    part = ArrayShard(buffer(mine), [begin for begin, _ in box], SHAPE)
    catalogue = BufferCatalogue({"w": part}, {}, 0, 1)
    catalogue.fill(catalogue.plan({number: shard.header for number, shard in shards.items()}, ""), shards)
    assert (mine == whole[within(box)]).all()


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6), st.integers(1, 5))
def test_what_all_ranks_hold_is_saved_once_and_read_whole(shapes, world):
    arrays = {f"a{number}": buffer(np.zeros(shape, np.uint16)) for number, shape in enumerate(shapes)}
    ranks = [BufferCatalogue(arrays, {}, rank, world) for rank in range(world)]
    saved = sum(chunk.size for each in ranks for chunk in each.layout.chunks)
    assert saved == sum(len(each.memory) for each in arrays.values())
    assert len({each.digest for each in ranks}) == 1
    for each in ranks:
        assert {chunk.shape for chunk, _ in each.wanted().values()} == {tuple(shape) for shape in shapes}


@pytest.mark.parametrize(("offsets", "shape"), [([3], [4]), ([0, 0], [4]), ([-1], [4]), ([], [])])
def test_a_part_that_lies_beyond_its_array_is_refused(offsets, shape):
    with pytest.raises(InvalidInput, match=r"w is declared as a box of .* which is too small: correct its ArrayShard"):
        BufferCatalogue({"w": ArrayShard(buffer(np.zeros(2, np.float32)), offsets, shape)}, {}, 0, 1)


def test_another_cut_is_another_state():
    half = buffer(np.zeros(2, np.float32))
    digests = {BufferCatalogue({"w": ArrayShard(half, [begin], [4])}, {}, 0, 2).digest for begin in (0, 2)}
    assert len(digests) == 2
