"""Shards on the volume: what is damaged is found when it is read, and is not offered again."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import pytest

from concertina_agent import protocol as p
from concertina_agent.shards import Damaged, Shard, commit, fill
from concertina_agent.snapshots import Snapshots

ID = p.SnapshotId(round=1, step=5, layout="digest", shards=1)
DATA = bytes(range(256)) * 4


def held(volume: Path) -> Shard:
    path = volume / "snapshots" / "round-1" / "shard-0" / "slot-0"
    header = p.ShardHeader(ID, 0, len(DATA), zlib.crc32(DATA))
    fill(path, header, io.BytesIO(DATA).readinto)
    return commit(path, header)


def test_a_damaged_shard_is_found_when_it_is_read_and_not_offered_again(tmp_path: Path) -> None:
    shard, snapshots = held(tmp_path), Snapshots(tmp_path)
    shard.verify()
    shard.path.write_bytes(DATA[:-1] + b"\0")
    assert snapshots.scan() == (p.Held(ID, (0,)),), "nobody knows before it is read"
    with pytest.raises(Damaged, match="crc32"):
        shard.verify()
    snapshots.discard(shard)
    assert snapshots.scan() == ()
    assert snapshots.find(ID, 0) is None
