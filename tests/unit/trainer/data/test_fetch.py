"""Transfer of an object in pieces."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import zlib
from pathlib import Path

import pytest

from concertina_data import fetch
from concertina_data.threads import Threads, one_per_process
from concertina_state.objects.prefix import ObjectPart, ObjectPrefix, StorageError

CONTENT = b"abcdefghij"


class Source:
    """Object in memory, whose spans are replaced by others as `spans` says."""

    def __init__(self, spans: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.spans = spans

    def get_part(self, span: tuple[int, int]) -> ObjectPart:
        begin, end = self.spans.get(span, span)
        return ObjectPart(memoryview(CONTENT)[begin:end], len(CONTENT))


def fetched(source: Source) -> tuple[fetch.Transfer | None, bytes]:
    written = bytearray(len(CONTENT))

    def put(begin: int, data: memoryview) -> None:
        written[begin : begin + len(data)] = data

    return fetch.fetch(source.get_part, len(CONTENT), put, Threads(2)), bytes(written)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE", 4)


def test_the_checksum_is_that_of_the_whole_object() -> None:
    assert fetched(Source({})) == (fetch.Transfer(10, zlib.crc32(CONTENT)), CONTENT)


def test_pieces_in_each_others_place_have_another_checksum() -> None:
    result, written = fetched(Source({(0, 4): (4, 8), (4, 8): (0, 4)}))
    assert result == fetch.Transfer(10, zlib.crc32(written))
    assert written == b"efghabcdij"


def test_pieces_that_are_the_object_only_one_after_the_other_are_refused() -> None:
    """Their checksum is right, but the second one begins at the wrong offset of the file."""
    result, _ = fetched(Source({(0, 4): (0, 5), (4, 8): (5, 8)}))
    assert result == fetch.Transfer(10, None)


def test_no_thread_writes_after_an_error() -> None:
    failed, written, threads = threading.Event(), list[int](), Threads(2)

    class Failing(Source):
        def get_part(self, span: tuple[int, int]) -> ObjectPart:
            if span == (0, 4):
                failed.set()
                raise StorageError("away")
            assert failed.wait(60)
            time.sleep(0.2)
            return super().get_part(span)

    with pytest.raises(StorageError, match="away"):
        fetch.fetch(Failing({}).get_part, len(CONTENT), lambda begin, data: written.append(begin), threads)
    before = list(written)
    assert 4 in before
    threads.end()
    threads.join(time.monotonic() + 60)
    assert written == before


@pytest.mark.parametrize("size", [0, 1, 3, 4, 9])
def test_no_more_is_requested_than_the_object_should_have(tmp_path: Path, size: int) -> None:
    """An object that is larger than the memory must not be downloaded as a whole to see that it is the wrong one."""
    (tmp_path / "object").write_bytes(CONTENT)
    source, spans = ObjectPrefix(str(tmp_path)), list[tuple[int, int]]()

    def get_part(span: tuple[int, int]) -> ObjectPart | None:
        spans.append(span)
        return source.get_part("object", span)

    written = list[int]()
    result = fetch.fetch(get_part, size, lambda begin, data: written.append(begin), Threads(2))
    assert result == fetch.Transfer(len(CONTENT), None)
    assert not written
    assert max(end for _, end in spans) == max(1, size)


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_an_object_that_ends_before_a_piece_is_not_downloaded_to_learn_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "object").write_bytes(content)
    monkeypatch.delattr(ObjectPrefix, "get")
    part = ObjectPrefix(str(tmp_path)).get_part("object", (8, 10))
    assert part == ObjectPart(memoryview(b""), len(content))
    assert ObjectPrefix(str(tmp_path)).get_part("missing", (8, 10)) is None


def test_threads_that_ask_at_the_same_time_get_one_result() -> None:
    begin, made = threading.Barrier(4), list[int]()

    @one_per_process
    def make(key: int) -> list[int]:
        made.append(key)
        time.sleep(0.2)
        return [key]

    def ask(key: int) -> list[int]:
        begin.wait()
        return make(key)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first, second, *others = pool.map(ask, [1, 1, 1, 2])
    assert first is second is others[0]
    assert others[1] == [2]
    assert sorted(made) == [1, 2]
