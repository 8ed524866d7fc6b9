"""File that is written in pieces: it exists completely or not at all.

A write error is raised even if a later call would not get it any more.
"""

import errno
import os
import resource
import threading

import pytest

from concertina_state.objects.file_writer import MOST_WAITING, SYNC, FileWriter
from concertina_state.objects.prefix import ObjectPrefix, StorageError


def pieces(count, size=1 << 20):
    return [memoryview(os.urandom(size)) for _ in range(count)]


def test_whole_or_not_at_all(tmp_path):
    folder, content = ObjectPrefix(str(tmp_path)), pieces(3 * MOST_WAITING)
    folder.put_pieces("a/whole", content, 0)
    assert (tmp_path / "a" / "whole").read_bytes() == b"".join(content)

    def broken():
        yield from content
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        folder.put_pieces("a/broken", broken(), 0)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["whole"]


def test_two_that_write_the_same_file_do_not_mix(tmp_path):
    one, two = (FileWriter(tmp_path / "file") for _ in range(2))
    for letter in (b"a", b"b"):
        one.write(memoryview(letter * 9))
        two.write(memoryview(letter.upper() * 9))
    two.close()
    assert (tmp_path / "file").read_bytes() == b"A" * 9 + b"B" * 9
    one.close()
    assert (tmp_path / "file").read_bytes() == b"a" * 9 + b"b" * 9
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_that_does_not_keep_up_is_waited_for(tmp_path, monkeypatch):
    made, most = [], []
    write = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (most.append(len(made)), write(file)))

    def counted():
        for _ in range(4 * SYNC // (8 << 20)):
            made.append(bytes(8 << 20))
            yield memoryview(made[-1])
            assert len(made) * (8 << 20) - (tmp_path / "file#1").stat().st_size <= (MOST_WAITING + 2) * (8 << 20)

    ObjectPrefix(str(tmp_path)).put_pieces("file", counted(), 0)
    assert len(most) == 4


def test_pieces_are_written_beside_a_sync(tmp_path, monkeypatch):
    given, beside = threading.Event(), []
    monkeypatch.setattr(os, "fdatasync", lambda file: beside.append(given.wait(5)))

    def all_but_what_the_next_sync_is_for():
        yield from pieces(2 * (SYNC >> 20) - 1)
        given.set()

    ObjectPrefix(str(tmp_path)).put_pieces("file", all_but_what_the_next_sync_is_for(), 0)
    assert beside == [True]


def test_what_the_disk_refused_is_said(tmp_path, monkeypatch):
    def refused(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refused)
    with pytest.raises(StorageError, match="Input/output error"):
        ObjectPrefix(str(tmp_path)).put_pieces("file", pieces(SYNC >> 20), 0)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_said(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, hard))
    try:
        with pytest.raises(StorageError, match="write file"):
            ObjectPrefix(str(tmp_path)).put_pieces("file", pieces(20), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
