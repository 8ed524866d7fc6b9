"""Shard file: safetensors itself reads it, and its header has one size for any content."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import safetensors.numpy

from concertina_protocol import SnapshotId
from concertina_protocol.sidecar import Damaged
from concertina_state.format.shardfile import (
    LONGEST_SET_NAME,
    MOST_SETS,
    Chunk,
    Continued,
    Evaluations,
    Layout,
    ShardMetadata,
    header_length,
    parse_header,
)

CHUNKS = [
    Chunk("b", "F32", (4, 0), (2, 3), (6, 3)),
    Chunk("a", "F32", (1,), (5,), (9,)),
    Chunk("half", "BF16", (0,), (3,), (3,)),
]
METADATA = ShardMetadata(SnapshotId(3, 7, "digest", 2), 1, 210, "c", "d", Continued("u", 1, 2))


def file(layout, facts):
    values = np.arange(11, dtype="<f4").tobytes() + bytes(6)
    content = layout.header(facts) + values
    assert len(content) == layout.size
    return content


def test_safetensors_reads_it():
    layout = Layout(CHUNKS[:2])
    content = layout.header(METADATA) + np.arange(11, dtype="<f4").tobytes()
    tensors = safetensors.numpy.load(content)
    assert tensors["a"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["b"].tolist() == [[5, 6, 7], [8, 9, 10]]


def test_what_was_written_is_read_back():
    layout = Layout(CHUNKS)
    content = file(layout, METADATA)
    begin = header_length(content[:8])
    header = parse_header(content[8:begin])
    assert header.metadata == METADATA
    assert {stored.chunk for stored in header.chunks.values()} == set(CHUNKS)
    a = header.chunks["a"]
    assert np.frombuffer(content[a.begin : a.begin + a.chunk.size], "<f4").tolist() == [0, 1, 2, 3, 4]


def test_data_is_aligned_and_stays_in_place_whatever_the_metadata_says():
    layout = Layout(CHUNKS)
    small = ShardMetadata(SnapshotId(0, 0, "", 0), 0, 0, "", "")
    least = -sys.float_info.max
    sets = {f"{number}{'n' * (LONGEST_SET_NAME - 1)}": least for number in range(MOST_SETS)}
    large = dataclasses.replace(
        small,
        evaluations=Evaluations("d" * 64, 2**53, least, sets, 2**53, least, least, 2**53, least, least, sets, sets),
    )
    headers = [layout.header(metadata) for metadata in (small, METADATA, large)]
    assert {len(header) for header in headers} == {layout.data_begin}
    assert parse_header(headers[2][8:]).metadata == large
    assert layout.data_begin % 64 == 0


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 80, json.dumps({"__metadata__": {}}).encode()])
def test_what_is_no_shard_is_refused(content):
    with pytest.raises(Damaged):
        parse_header(content[8 : header_length(content[:8])])


def test_a_chunk_whose_place_has_other_dimensions_is_refused():
    content = Layout(CHUNKS).header(METADATA)
    header = json.loads(content[8 : header_length(content[:8])])
    offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    offsets["a"]["saved_offsets"] = []
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
    with pytest.raises(Damaged, match="different numbers of dimensions"):
        parse_header(json.dumps(header).encode())
