"""Slots of snapshots on the agent's volume."""

from __future__ import annotations

import json
from pathlib import Path

from concertina_agent.files.snapshots import SnapshotFiles

ID = {"round": 1, "step": 6, "layout": "layout", "shards": 1}
MARK = {"id": ID, "shard": 0, "size": 3, "crc32": 0, "committed": True}


def slot(volume: Path) -> Path:
    path = volume / "snapshots" / "round-1" / "shard-0" / "slot-0"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"abc")
    path.with_suffix(".json").write_text(json.dumps(MARK))
    return path


def test_a_mark_whose_file_is_gone_stands_for_nothing(tmp_path: Path) -> None:
    path = slot(tmp_path)
    assert [held.id.step for held in SnapshotFiles(tmp_path).scan()] == [6]
    path.unlink()
    assert SnapshotFiles(tmp_path).scan() == ()


def test_a_slot_that_was_shipped_under_its_second_name_stays(tmp_path: Path) -> None:
    path, snapshots = slot(tmp_path), SnapshotFiles(tmp_path)
    link = snapshots.link_for_shipping(path, 6)
    assert link.read_bytes() == b"abc"
    link.unlink()
    assert [held.id.step for held in snapshots.scan()] == [6]
