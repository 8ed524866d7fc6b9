"""A stored shard is read straight into place: which bytes come where, and that each block that is read is checked."""

import random

import pytest

from concertina_protocol import SnapshotId
from concertina_protocol.worker_channel import Publish, Ship
from concertina_state.checkpoints.manifest import BLOCK
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.objects import retry
from concertina_state.objects.prefix import StorageError
from concertina_state.uploader import Destination, answer

RANDOM = random.Random(1)
SIZE = 3 * BLOCK + 12344
"""Bytes of the one tensor."""
DAMAGED = r"safetensors is damaged: its bytes \d+ to \d+"


@pytest.fixture
def content(tmp_path):
    id = SnapshotId(1, 5, "layout", 1)
    layout = Layout([Chunk("x", "U8", (0,), (SIZE,), (SIZE,))])
    path = tmp_path / "shard"
    path.write_bytes(layout.header(ShardMetadata(id, 0, 35, "config", "data")) + RANDOM.randbytes(SIZE))
    whole = path.read_bytes()
    destination = Destination(uri=f"file://{tmp_path}/stored")
    assert answer(Ship(id, 0, str(path)), destination, "u1").error == ""
    assert answer(Publish(id), destination, "u1").durable
    return whole


@pytest.fixture
def file(content, tmp_path):
    [file] = (tmp_path / "stored").rglob("*.safetensors")
    return file


@pytest.fixture
def part(file, monkeypatch):
    monkeypatch.setattr(retry, "GRACE", (0.01, 0.01))
    part = StoredCheckpoint(f"file://{file.parent}").shards[0]
    assert part.header.metadata.position == 35
    return part


def test_any_ranges_come_into_their_places(part, content):
    for count in [1, 2, 3, 5, 50]:
        begins = sorted(RANDOM.randrange(len(content)) for _ in range(count))
        most = len(content) // count
        parts = [(at, bytearray(min(len(content) - at, RANDOM.randrange(most + 1)))) for at in begins]
        RANDOM.shuffle(parts)
        part.read_into([(at, memoryview(target)) for at, target in parts])
        for at, target in parts:
            assert target == content[at : at + len(target)]


def test_a_bad_byte_is_found_wherever_it_is_in_a_block_that_is_read(part, file, content):
    size = len(content)
    wanted = [(100, bytearray(10)), (BLOCK - 5, bytearray(10)), (size - 10, bytearray(10))]
    places = [*(RANDOM.randrange(at, at + 10) for at, _ in wanted), 50_000, BLOCK + 7, 2 * BLOCK - 1, size - 11]
    for place in places:
        with file.open("r+b") as stored:
            stored.seek(place)
            stored.write(bytes([content[place] ^ 1]))
        with pytest.raises(InvalidInput, match=f"{DAMAGED} differ from"):
            part.read_into([(at, memoryview(target)) for at, target in wanted])
        with file.open("r+b") as stored:
            stored.seek(place)
            stored.write(content[place : place + 1])
    part.read_into([(at, memoryview(target)) for at, target in wanted])


def test_a_file_that_was_cut_short_is_named(part, file, content):
    with file.open("r+b") as stored:
        stored.truncate(len(content) - 1)
    with pytest.raises(InvalidInput, match=f"{DAMAGED} are missing"):
        part.read([(len(content) - 10, len(content))])
    assert part.read([(BLOCK - 5, BLOCK + 5)])[0] == content[BLOCK - 5 : BLOCK + 5]


@pytest.mark.parametrize("gone", ["*", "*.json"])
def test_a_checkpoint_that_was_deleted_meanwhile_is_not_called_damaged(part, file, gone):
    """By a sweep, of one that is read without a lease: the run has newer ones."""
    for path in file.parent.glob(gone):
        path.unlink()
    with pytest.raises(StorageError, match=r"has no manifest.json: .* was deleted because newer checkpoints exist"):
        part.read([(0, 10)])
