"""Shards in the volume: a damaged one is found when it is read, and is not offered again."""

from __future__ import annotations

import dataclasses
import io
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import concertina_protocol as p
from concertina_agent.files.shards import Shard, commit, fill, part_of
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_protocol.sidecar import Damaged, remove_sidecar

ID = p.SnapshotId(round=1, step=5, layout="digest", shards=1)
DATA = bytes(range(256)) * 4


def held(volume: Path, id: p.SnapshotId = ID, data: bytes = DATA) -> Shard:
    path = volume / "snapshots" / "round-1" / "shard-0" / "slot-0"
    header = p.ShardHeader(id, 0, len(data), zlib.crc32(data))
    return commit(path, header, [fill(path, header, io.BytesIO(data).readinto)])


def test_a_damaged_shard_is_found_when_it_is_read_and_not_offered_again(tmp_path: Path) -> None:
    shard, snapshots = held(tmp_path), SnapshotFiles(tmp_path)
    shard.verify()
    shard.path.write_bytes(DATA[:-1] + b"\0")
    assert snapshots.scan() == (p.HeldSnapshot(ID, (0,)),), "nobody knows before it is read"
    with pytest.raises(Damaged, match="crc32"):
        shard.verify()
    snapshots.discard(shard)
    assert snapshots.scan() == ()
    assert snapshots.find(ID, 0) is None


def test_what_has_taken_the_place_of_a_shard_that_was_read_too_late_stays(tmp_path: Path) -> None:
    before, snapshots = held(tmp_path), SnapshotFiles(tmp_path)
    after = held(tmp_path, dataclasses.replace(ID, step=7), DATA[::-1])
    snapshots.committed(after.path)
    with pytest.raises(Damaged, match="crc32"):
        before.verify()
    snapshots.discard(before)
    assert snapshots.find(after.id, 0) == snapshots.newest(1, 0, after_step=5) == after
    remove_sidecar(after.path)
    snapshots.discard(after)
    assert snapshots.newest(1, 0, after_step=5) is None, "it is being written over: nobody is to be sent there"


@pytest.mark.parametrize("size", [-1, 2**63, 10**30])
def test_a_shard_of_an_impossible_size_is_damaged(tmp_path: Path, size: int) -> None:
    """A peer may announce such a size. An error other than Damaged would end the agent."""
    with pytest.raises(Damaged, match="can't be of"):
        fill(tmp_path / "slot-0", p.ShardHeader(ID, 0, size, 0), io.BytesIO(DATA).readinto)


def test_a_shard_that_is_cut_off_after_any_byte_does_not_count(tmp_path: Path) -> None:
    """The shard is cut off on its way or in the volume. The older one beside it is still found."""
    older = held(tmp_path, dataclasses.replace(ID, step=3))
    path, header = older.path.with_name("slot-1"), p.ShardHeader(ID, 0, len(DATA), zlib.crc32(DATA))
    for end in range(0, len(DATA), 13):
        with pytest.raises(Damaged, match="was cut off"):
            fill(path, header, io.BytesIO(DATA[:end]).readinto)
        assert SnapshotFiles(tmp_path).scan() == (p.HeldSnapshot(older.id, (0,)),)
    newer = commit(path, header, [fill(path, header, io.BytesIO(DATA).readinto)])
    for end in range(0, len(DATA), 13):
        path.write_bytes(DATA[:end])
        with pytest.raises(Damaged, match="early"):
            newer.verify()
        assert SnapshotFiles(tmp_path).find(ID, 0) is None
        assert SnapshotFiles(tmp_path).find(older.id, 0) == older


@given(st.integers(0, 200), st.integers(1, 9))
def test_each_byte_is_in_one_part_and_parts_are_equally_long_but_for_a_byte(size: int, parts: int) -> None:
    all_parts = [part_of(size, number, parts) for number in range(parts)]
    assert [byte for part in all_parts for byte in part] == list(range(size))
    assert max(map(len, all_parts)) - min(map(len, all_parts)) <= 1


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_shard_in_parts_is_whole_in_whatever_order_they_come(tmp_path: Path, parts: int) -> None:
    shard = held(tmp_path)
    header, path = dataclasses.replace(shard.header, parts=parts), tmp_path / "copy"
    path.write_bytes(b"what the slot held before " * len(DATA))
    checksums = {}
    for number in reversed(range(parts)):
        sent = b"".join(bytes(chunk) for chunk in shard.chunks(number, parts))
        checksums[number] = fill(path, header, io.BytesIO(sent).readinto, number)
    commit(path, header, [checksums[number] for number in range(parts)]).verify()
    assert path.read_bytes() == DATA
    with pytest.raises(Damaged, match="did not arrive completely"):
        commit(path, header, [checksums[number] ^ (number == parts - 1) for number in range(parts)])
