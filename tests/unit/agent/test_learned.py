"""Record of a script's imports, as the next parent reads it."""

import os
import sys
from pathlib import Path

import pytest

from concertina_agent.workers import blas
from concertina_agent.workers.learned import Imported, Recorder, lines_to_tell, read


def test_modules_are_written_down_in_order_with_the_variables_that_were_changed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "modules")
    monkeypatch.setenv("GIVEN", "1")
    recorder = Recorder(path)
    for name in ("one", "one.two", "three", "json"):
        monkeypatch.setitem(sys.modules, name, sys)
    recorder.find_spec("one")
    monkeypatch.setenv("SET", "2")
    recorder.find_spec("one.two")
    monkeypatch.delenv("GIVEN")
    recorder.find_spec("three")
    recorder.find_spec("json")
    recorder.find_spec("one")
    expected = [Imported("one"), Imported("one.two"), Imported("three", {"SET": "2", "GIVEN": None})]
    assert read(path) == expected
    assert expected[1].package == "one"


STRANGE = (
    b"no JSON", b"[1, {}]", b'["a b", {}]', b'["", {}]', b'[".a", {}]', b'["a", []]', b'["a", {"A=B": "c"}]',
    b'["a", {"": "c"}]', b'["a", {"A": 1}]', b'["a", {"A": "\\u0000"}]', b'["a", {}, 1]', b"[[], null]", b"[" * 99_999,
)  # fmt: skip


@pytest.mark.parametrize("line", STRANGE)
def test_a_line_that_nobody_here_would_write_is_passed_over(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "modules").write_bytes(line + b'\n["known", {"A": null}]\n')
    assert read(str(tmp_path / "modules")) == [Imported("known", {"A": None})]
    assert Imported("known", {"A": None}).line == '["known", {"A": null}]'


def test_what_was_only_asked_about_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "modules")
    recorder = Recorder(path)
    recorder.find_spec("not_imported")
    assert read(path) == [Imported("not_imported")], "it may be the last one, and be imported"
    monkeypatch.setitem(sys.modules, "imported", sys)
    recorder.find_spec("imported")
    assert read(path) == [Imported("imported")]
    recorder.find_spec("not_imported")
    monkeypatch.setitem(sys.modules, "not_imported", sys)
    recorder.find_spec("another")
    assert read(path) == [Imported("imported"), Imported("not_imported"), Imported("another")]


def test_what_is_asked_about_again_and_again_is_written_once(tmp_path: Path) -> None:
    """Accelerate looks for some packages at each step. A file that keeps growing is never quiet."""
    path = tmp_path / "modules"
    recorder = Recorder(str(path))
    sizes = []
    for _ in range(3):
        recorder.find_spec("not_there")
        recorder.find_spec("nor_this")
        sizes.append(path.stat().st_size)
    recorder.find_spec("not_there")
    assert path.stat().st_size == sizes[1], sizes
    assert read(str(path)) == []


def test_a_later_worker_that_asks_for_the_same_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Python looks for modules that do not exist at each start.

    A file that grows makes a parent import anew.
    """
    path = tmp_path / "modules"
    monkeypatch.setitem(sys.modules, "imported", sys)

    def written() -> bytes:
        recorder = Recorder(str(path))
        for name in ("apport_python_hook", "usercustomize", "imported", "last"):
            recorder.find_spec(name)
        return path.read_bytes()

    assert written() == written()
    assert read(str(path)) == [Imported("imported"), Imported("last")]


def test_what_another_replica_is_told_is_known_there_too(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.write_bytes(b'["first", {"A": "1"}]\n["not_there", {}]\n["not_there", null]\n["last", {}]\n')
    there.write_text(lines_to_tell(str(here)))
    before = there.read_bytes()
    recorder = Recorder(str(there))
    for name in ("first", "not_there", "last"):
        recorder.find_spec(name)
    assert there.read_bytes() == before
    recorder.find_spec("new")
    assert read(str(there)) == [*read(str(here)), Imported("new")], "a line of its own"


def test_a_child_of_the_script_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(str(tmp_path / "modules"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    recorder.find_spec("one")
    assert read(str(tmp_path / "modules")) == []


@pytest.mark.parametrize("strange", ["", "x", "[]", "[1]", "[[], {}]", '["a", 3]', '["a", {}', "\x00\xff", "null"])
def test_lines_that_can_not_be_read_are_passed_over(strange: str, tmp_path: Path) -> None:
    path = tmp_path / "modules"
    path.write_text(f'["first", {{}}]\n{strange}\n["last", {{"A": "b"}}]\n')
    records_read = read(str(path))
    assert [records_read[0], records_read[-1]] == [Imported("first"), Imported("last", {"A": "b"})]


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}, 2),
        ({"OPENBLAS_NUM_THREADS": "many", "GOTO_NUM_THREADS": "4"}, 4),
        ({}, 4),
        ({"OMP_NUM_THREADS": "9"}, 4),
    ],
)
def test_openblas_gets_as_many_threads_as_it_would_take(
    environment: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert blas._threads(environment) == threads
