"""Storage over a bad line: a proxy in front of the real S3 server cuts, truncates and spoils what passes."""

import os
import ssl
from datetime import timedelta

import pytest

from builders.stores import hostile
from concertina.local.control_plane import certificates
from concertina_protocol import SnapshotId
from concertina_protocol.worker_channel import Publish, Ship
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.objects import retry
from concertina_state.objects.prefix import ObjectPrefix, StorageError
from concertina_state.uploader import Destination, answer

ROWS = 2_500_000
"""Of three float32: a part of 30 MB, which has several blocks and goes up in two pieces."""


@pytest.fixture
def line(s3, monkeypatch):
    with hostile.proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def hasty(monkeypatch):
    """As many tries as ever, one soon after the other."""
    monkeypatch.setattr(retry, "GRACE", (0.01, 0.01))


def ship(tmp_path, uri: str) -> tuple[SnapshotId, str]:
    id = SnapshotId(1, 5, "layout", 1)
    layout = Layout([Chunk("x", "F32", (0, 0), (ROWS, 3), (ROWS, 3))])
    path = tmp_path / "shard"
    path.write_bytes(layout.header(ShardMetadata(id, 0, 35, "config", "data")) + os.urandom(12 * ROWS))
    os.link(path, tmp_path / "kept")
    return id, answer(Ship(id, 0, str(path)), Destination(uri=uri), "u1").error


@pytest.fixture
def stored(line, tmp_path):
    uri = f"s3://train/{tmp_path.name}"
    id, error = ship(tmp_path, uri)
    assert error == ""
    return answer(Publish(id), Destination(uri=uri), "u1").durable.uri


@pytest.mark.parametrize("fault", ["cut", "truncate", "flip", "503"])
def test_a_bad_answer_is_asked_for_again(line, stored, fault, tmp_path):
    content = (tmp_path / "kept").read_bytes()
    checkpoint = StoredCheckpoint(stored)
    part = checkpoint.shards[0]
    end = part.file.size
    assert part.header.metadata.position == 35
    line.faults = [("GET", ".safetensors", fault)]
    [data] = part.read([(end - 100, end)])
    assert line.done == [fault]
    assert bytes(data) == content[-100:]
    line.faults = [("GET", ".safetensors", fault)]
    assert b"".join(part.blocks()) == content
    assert line.done == [fault, fault]


@pytest.mark.parametrize("fault", ["cut", "truncate", "503"])
def test_a_listing_or_a_deletion_that_fails_is_asked_for_again(line, stored, fault):
    folder = ObjectPrefix(stored)
    expected = folder.list("")
    line.faults = [("GET", "list-type", fault)]
    assert folder.list("") == expected
    line.faults += [(method, "/train", fault) for method in ("DELETE", "POST")]
    folder.delete(["manifest.json"])
    line.faults = []
    assert sorted({*expected} - {*folder.list("")}) == ["manifest.json"]
    assert line.done == [fault, fault]


def test_what_stays_bad_is_named(line, stored, hasty):
    part = StoredCheckpoint(stored).shards[0]
    assert part.header.metadata.position == 35
    line.faults = [("GET", ".safetensors", "flip")] * 100
    with pytest.raises(InvalidInput, match=r"shard-0-of-1.safetensors is damaged: its bytes \d+ to \d+ differ from"):
        part.read([(part.file.size - 100, part.file.size)])


@pytest.mark.parametrize("change", ["deleted", "shortened"])
def test_a_part_that_is_not_whole_is_damage_not_a_store_that_is_away(line, stored, change, hasty):
    folder = ObjectPrefix(stored)
    [key] = [key for key in folder.list("") if key.endswith(".safetensors")]
    part = StoredCheckpoint(stored).shards[0]
    assert part.header.metadata.position == 35
    if change == "deleted":
        folder.delete([key])
    else:
        folder.put(key, folder.get(key)[: part.file.size // 2])
    with pytest.raises(InvalidInput, match=r"shard-0-of-1.safetensors is damaged: its bytes \d+ to \d+ are missing"):
        part.read([(part.file.size - 100, part.file.size)])


def test_a_part_that_is_not_visible_yet_is_waited_for(line, stored, hasty):
    part = StoredCheckpoint(stored).shards[0]
    line.faults = [("GET", ".safetensors", "404")] * 2
    assert part.header.metadata.position == 35
    assert line.done == ["404", "404"]


@pytest.mark.parametrize("fault", ["cut", "503", "flip-request"])
def test_what_is_spoilt_on_the_way_up_never_counts_as_stored(line, tmp_path, fault):
    """Sent again, or refused by the server's own check of the body and then shipped anew."""
    uri = f"s3://train/{tmp_path.name}"
    line.faults = [("PUT", ".safetensors", fault)]
    id, error = ship(tmp_path, uri)
    if error:
        assert "safetensors" in error
        assert answer(Ship(id, 0, str(tmp_path / "shard")), Destination(uri=uri), "u1").error == ""
    assert line.done == [fault]
    durable = answer(Publish(id), Destination(uri=uri), "u1").durable
    part = StoredCheckpoint(durable.uri).shards[0]
    assert b"".join(part.blocks()) == (tmp_path / "kept").read_bytes()


def test_a_store_behind_a_ca_of_its_own(s3, monkeypatch, tmp_path):
    authority = certificates.ClusterAuthority.create(tmp_path / "ca")
    pair = authority.issue("server", "store", hosts=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with hostile.proxy(s3.endpoint, context) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(StorageError, match="set AWS_CA_BUNDLE or SSL_CERT_FILE to the PEM file of its CA"):
            ObjectPrefix("s3://train/tls", timedelta(seconds=1)).get("LATEST")
        for variable in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
            monkeypatch.setenv(variable, str(authority.pair.certificate))
            folder = ObjectPrefix("s3://train/tls")
            folder.put("key", variable.encode())
            assert folder.get("key") == variable.encode()
            monkeypatch.delenv(variable)
