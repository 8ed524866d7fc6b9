"""Slots of snapshots in the agent's volume."""

from __future__ import annotations

import json
import os
from pathlib import Path

from builders.until import until
from concertina_agent.files.snapshot_files import SnapshotFiles

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


def test_what_is_freed_gives_its_memory_back_though_it_is_open(tmp_path: Path) -> None:
    path, snapshots = slot(tmp_path), SnapshotFiles(tmp_path)
    snapshots.link_for_shipping(path, 6)
    with path.open("rb") as shipping:
        snapshots.free(path.parent)
        until(lambda: os.fstat(shipping.fileno()).st_size == 0, "that both names are gone")


def test_a_slot_whose_upload_is_given_up_stays_as_it_is(tmp_path: Path) -> None:
    path, snapshots = slot(tmp_path), SnapshotFiles(tmp_path)
    snapshots.free(snapshots.link_for_shipping(path, 6))
    until(lambda: path.stat().st_nlink == 1, "that its second name is gone")
    assert [held.id.step for held in snapshots.scan()] == [6]
    assert path.read_bytes() == b"abc"
