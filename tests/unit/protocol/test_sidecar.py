"""Sidecar of a shard file: its stable format, and the conditions under which the file counts."""

import json

import pytest

from concertina_protocol import SnapshotId
from concertina_protocol.sidecar import Sidecar, read_sidecar, remove_sidecar, sidecar_path, write_sidecar

SIDECAR = Sidecar(SnapshotId(1, 6, "layout", 2), 1, 3, 891568578)
ON_DISK = {
    "id": {"round": 1, "step": 6, "layout": "layout", "shards": 2},
    "shard": 1,
    "size": 3,
    "crc32": 891568578,
    "committed": True,
}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "slot-0").write_bytes(b"abc")
    return tmp_path / "slot-0"


def test_a_file_is_there_from_its_sidecar_on_until_that_goes(file):
    assert read_sidecar(file) is None
    write_sidecar(file, SIDECAR)
    assert read_sidecar(file) == SIDECAR
    assert json.loads((file.parent / "slot-0.json").read_text()) == ON_DISK, "a pod of another version reads it"
    remove_sidecar(file)
    remove_sidecar(file)
    assert read_sidecar(file) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({**ON_DISK, "size": 4}), '{"committed": true}'])
def test_what_does_not_fit_the_file_is_no_sidecar(file, text):
    sidecar_path(file).write_text(text)
    assert read_sidecar(file) is None


def test_a_sidecar_whose_file_is_gone_is_none(file):
    write_sidecar(file, SIDECAR)
    file.unlink()
    assert read_sidecar(file) is None
