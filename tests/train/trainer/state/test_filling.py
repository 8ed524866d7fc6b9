"""A state is filled from shards however either is cut: into a tensor itself where the bytes lie in one stretch."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_protocol import SnapshotId
from concertina_state.errors import RestoreFailed
from concertina_state.format.read_plan import reads
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.saved import LocalShard
from concertina_state.tensors import execute

SHAPE = (7, 5)


def boxes(rows, columns):
    """Of a grid with these cuts: (offsets, shape)."""
    for (top, bottom), (left, right) in product(*(pairwise((0, *cut)) for cut in (rows, columns))):
        yield (top, left), (bottom - top, right - left)


def cuts(end):
    return st.sets(st.integers(1, end - 1), max_size=3).map(lambda found: (*sorted(found), end))


GRIDS = st.tuples(cuts(SHAPE[0]), cuts(SHAPE[1]))


def saved(folder, whole, grid):
    """Write a shard file for each box, and return the files."""
    cut = list(boxes(*grid))
    for number, (offsets, shape) in enumerate(cut):
        id = SnapshotId(1, 5, "digest", len(cut))
        layout = Layout([Chunk("w", "F32", offsets, shape, SHAPE)])
        rows, columns = (slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
        path = folder / f"shard-{number}"
        path.write_bytes(layout.header(ShardMetadata(id, number, 0, "", "")) + whole[rows, columns].numpy().tobytes())
        yield LocalShard(path, id)


def fill(wanted, tensor, shards):
    plan = reads({number: shard.header for number, shard in enumerate(shards)}, [wanted])
    assert not plan.lacking
    execute(plan, dict(enumerate(shards)), {wanted: tensor})


@settings(max_examples=60, deadline=None)
@given(GRIDS, GRIDS)
def test_any_cut_from_any_other(tmp_path_factory, before, after):
    whole = torch.arange(35, dtype=torch.float32).view(SHAPE)
    shards = list(saved(tmp_path_factory.mktemp("shards"), whole, before))
    for offsets, shape in boxes(*after):
        tensor = torch.full(shape, -1.0)
        fill(Chunk("w", "F32", offsets, shape, SHAPE), tensor, shards)
        rows, columns = (slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
        assert torch.equal(tensor, whole[rows, columns])


def test_a_file_that_became_shorter_is_said(tmp_path):
    whole = torch.ones(SHAPE)
    [shard] = saved(tmp_path, whole, ((7,), (5,)))
    file = tmp_path / "shard-0"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 8)
    with pytest.raises(RestoreFailed, match="ends 8 bytes early"):
        fill(Chunk("w", "F32", (0, 0), SHAPE, SHAPE), torch.zeros(SHAPE), [shard])
