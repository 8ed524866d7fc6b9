"""Transfer of an object in pieces."""

from __future__ import annotations

import threading
import time
import zlib

import pytest

from concertina_data import fetch
from concertina_data.threads import Threads
from concertina_state.objects.prefix import ObjectPart, ObjectPrefix, StorageError

CONTENT = b"abcdefghij"


class Source(ObjectPrefix):
    """Object in memory, whose spans are replaced by others as `spans` says."""

    def __init__(self, spans: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.spans = spans

    def get_part(self, key: str, span: tuple[int, int] | None) -> ObjectPart:
        assert span is not None
        begin, end = self.spans.get(span, span)
        return ObjectPart(memoryview(CONTENT)[begin:end], len(CONTENT))


def fetched(source: ObjectPrefix) -> tuple[fetch.Fetched | None, bytes]:
    written = bytearray(len(CONTENT))

    def put(begin: int, data: memoryview) -> None:
        written[begin : begin + len(data)] = data

    return fetch.fetch(source, "object", len(CONTENT), put, Threads(2)), bytes(written)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE", 4)


def test_the_checksum_is_that_of_the_whole_object() -> None:
    assert fetched(Source({})) == (fetch.Fetched(10, zlib.crc32(CONTENT)), CONTENT)


def test_pieces_in_each_others_place_have_another_checksum() -> None:
    result, written = fetched(Source({(0, 4): (4, 8), (4, 8): (0, 4)}))
    assert result == fetch.Fetched(10, zlib.crc32(written))
    assert written == b"efghabcdij"


def test_pieces_that_are_the_object_only_one_after_the_other_are_refused() -> None:
    """Their checksum is right, but the second one begins at the wrong offset of the file."""
    result, _ = fetched(Source({(0, 4): (0, 5), (4, 8): (5, 8)}))
    assert result == fetch.Fetched(10, None)


def test_no_thread_writes_after_an_error() -> None:
    failed, written, threads = threading.Event(), list[int](), Threads(2)

    class Failing(Source):
        def get_part(self, key: str, span: tuple[int, int] | None) -> ObjectPart:
            if span == (4, 8):
                failed.set()
                raise StorageError("away")
            assert failed.wait(60)
            time.sleep(0.2)
            return super().get_part(key, span)

    with pytest.raises(StorageError, match="away"):
        fetch.fetch(Failing({}), "object", len(CONTENT), lambda begin, data: written.append(begin), threads)
    before = list(written)
    assert 0 in before
    threads.end()
    threads.join(time.monotonic() + 60)
    assert written == before
