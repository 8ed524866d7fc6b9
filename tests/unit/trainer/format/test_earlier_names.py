"""Key and value, and gate and up, were one tensor each: their bytes are found under today's names."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from concertina_protocol import SnapshotId
from concertina_state.format.read_plan import Box, reads
from concertina_state.format.shardfile import Chunk, Header, ShardMetadata, StoredChunk
from concertina_trainer.format.earlier_names import of_today

NOBODY = ShardMetadata(SnapshotId(0, 0, "", 1), 0, 0, "", "")
BEGIN = 100


@given(half=st.integers(1, 6), edges=st.sets(st.integers(0, 12)), kind=st.sampled_from(["model", "optimizer.exp_avg"]))
def test_each_half_of_a_cut_tensor_is_found_where_it_lies(half, edges, kind):
    columns, whole = 3, 2 * half
    values = np.arange(whole * columns, dtype=np.float32).reshape(whole, columns)
    cuts = sorted({0, whole, *(edge for edge in edges if edge < whole)})
    held, files = {}, {}
    for shard, (begin, end) in enumerate(itertools.pairwise(cuts)):
        name = f"{kind}.blocks.0.attention.key_value.weight"
        chunk = Chunk(name, "F32", (begin, 0), (end - begin, columns), (whole, columns))
        held[shard] = of_today(Header(NOBODY, {name: StoredChunk(chunk, BEGIN)}))
        files[shard] = b"\0" * BEGIN + values[begin:end].tobytes()
    wanted = [
        Chunk(f"{kind}.blocks.0.attention.{part}.weight", "F32", (0, 0), (half, columns), (half, columns))
        for part in ("key", "value")
    ]
    plan = reads(held, wanted)
    assert not plan.lacking
    for chunk, expected in zip(wanted, (values[:half], values[half:]), strict=True):
        found = np.full((half, columns), np.nan, dtype=np.float32)
        for item in plan.of(chunk):
            rows = np.frombuffer(files[item.shard][item.begin : item.begin + item.size], dtype=np.float32)
            found[item.box.within(Box.of(chunk))] = rows.reshape(item.rows.shape)[item.box.within(item.rows)]
        np.testing.assert_array_equal(found, expected)


def test_other_tensors_stay_as_they_are():
    chunk = Chunk("model.blocks.0.feed_forward.down.weight", "F32", (2, 0), (1, 3), (4, 3))
    header = Header(NOBODY, {chunk.name: StoredChunk(chunk, BEGIN)})
    assert of_today(header) == header
