"""Master keys of the operator in its Secret."""

from __future__ import annotations

import base64

import pytest

from concertina.controller.master_keys import MasterKeyError, key_id, parse

NEW, OLD = b"n" * 32, b"o" * 64


def data(**entries: bytes) -> dict[str, str]:
    return {name.replace("_", "-"): base64.b64encode(content).decode() for name, content in entries.items()}


def test_jobs_keep_the_key_they_were_started_with_and_new_ones_take_the_active() -> None:
    keys = parse(data(key_2026=OLD, key=NEW + b"\n", other=b"short, and none of ours"))
    assert list(keys.by_id) == [key_id(NEW), key_id(OLD)]
    assert (keys.of(key_id(OLD)), keys.of(key_id(NEW)), keys.of("")) == (OLD, NEW, NEW)
    assert keys.of(key_id(b"x" * 32)) is None


def test_a_keys_id_is_its_own_whatever_its_entry_is_called() -> None:
    assert parse(data(key=OLD)).by_id.keys() == {key_id(OLD)}
    assert list(parse(data(key=NEW, key_a=OLD)).by_id) == list(parse(data(key=NEW, key_z=OLD)).by_id)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({}, "has no entry 'key'"),
        ({"key_old": OLD}, "has no entry 'key'"),
        ({"key": b"short"}, "has an entry 'key' of 5 bytes, and a key needs at least 32"),
        ({"key": NEW, "key_old": b""}, "has an entry 'key-old' of 0 bytes"),
    ],
)
def test_a_secret_without_a_key_to_go_on_with(entries: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(MasterKeyError, match=sentence):
        parse(data(**entries))
