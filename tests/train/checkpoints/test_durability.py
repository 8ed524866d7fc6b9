"""Test that a checkpoint is on the disk before `LATEST` names it, for storage in files.

A node that loses its power in the middle of a save must not lose a checkpoint that was reported as durable. Content
that is only in the kernel's memory would be lost.
"""

import ctypes
import os

import pytest

from builders.train.published import publish, shard_file
from concertina_protocol import SnapshotId
from concertina_protocol.worker_channel import Ship
from concertina_state.checkpoints import catalogue
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, answer

CACHESTAT = 451
"""Number of the system call of Linux 6.5 that tells how much of a file is not on the disk yet; on all architectures."""


def unsettled(path):
    """Pages of a file that are on no disk yet; None where the kernel does not tell."""
    counts = pages(path)
    return None if counts is None else counts[1] + counts[2]


def pages(path):
    """Of a file: how many are in memory, changed, being written, ...; None where the kernel does not tell."""
    range, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        failed = ctypes.CDLL(None).syscall(CACHESTAT, descriptor, range, counts, 0)
    finally:
        os.close(descriptor)
    return None if failed else tuple(counts)


@pytest.fixture
def run(tmp_path):
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 100_000)
    if not unsettled(probe):
        pytest.skip("this kernel, or this file system, does not tell what is on the disk")
    return tmp_path / "run"


def in_memory_only(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and unsettled(path))


def test_whatever_latest_names_was_on_the_disk_before(run, tmp_path, monkeypatch):
    put_if, seen = ObjectPrefix.put_if, []

    def looking(self, key, value, version):
        seen.append(in_memory_only(run))
        put_if(self, key, value, version)

    monkeypatch.setattr(ObjectPrefix, "put_if", looking)
    for step in (1, 2):
        assert publish(f"file://{run}", tmp_path, 1, step).durable.step == step
        assert in_memory_only(run) == [], "LATEST itself"
    assert seen == [[], []]


def test_a_part_that_was_said_to_be_shipped_is_on_the_disk(run, tmp_path):
    id = SnapshotId(1, 5, "layout", 2)
    shipped = answer(Ship(id, 0, str(shard_file(tmp_path, id, 0))), Destination(uri=f"file://{run}"), "u1")
    assert shipped.error == ""
    assert len([path for path in run.rglob("*") if path.is_file()]) == 2
    assert in_memory_only(run) == []


def test_parts_older_than_the_newest_leave_memory_to_the_next(run, tmp_path):
    """The newest is what a restore would read."""
    parts = []
    for round, step in ((1, 9), (2, 4), (2, 12)):
        id = SnapshotId(round, step, "layout", 2)
        answer(Ship(id, 0, str(shard_file(tmp_path, id, 0))), Destination(uri=f"file://{run}"), "u1")
        parts.append(run / "u1" / f"round-{round}" / f"step-{step}" / "shard-0-of-2.safetensors")
    found = [pages(part) for part in parts]
    if None in found:
        pytest.skip("this kernel does not tell what of a file is in memory")
    assert [counts[0] > 0 for counts in found] == [False, True, True]


def test_a_copy_is_on_the_disk_when_it_is_said_to_be_one(run, tmp_path):
    source = StoredCheckpoint(publish(f"file://{tmp_path}/from", tmp_path, 1, 1).durable.uri)
    catalogue.copy(source, ObjectPrefix(f"file://{run}", create=True), lambda count: None)
    assert (run / "LATEST").exists()
    assert in_memory_only(run) == []
