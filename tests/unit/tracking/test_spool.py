"""Spool: records are read in the order of writing, whatever is killed, and its size stays within the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from concertina_protocol.tracking.spool import SpoolReader, SpoolWriter
from concertina_protocol.tracking.tracking_records import RoundBegan, StepDone


def step(number: int, round: int = 1) -> StepDone:
    return StepDone(round, number, 0.0, {"loss": 0.5})


def steps(reader: SpoolReader) -> list[int]:
    return [record.step for _, record in reader.read(1000) if isinstance(record, StepDone)]


def test_a_new_writer_and_a_new_reader_go_on_where_the_old_ones_were(tmp_path: Path) -> None:
    first = SpoolWriter(tmp_path)
    for number in range(3):
        first.append(step(number))
    reader = SpoolReader(tmp_path)
    reader.look()
    assert (reader.end, reader.behind) == (3, 3)
    reader.shipped(2)
    (segment,) = tmp_path.glob("*.jsonl")
    with segment.open("ab") as file:
        file.write(b'{"kind":"StepDone","bo')  # The writer was killed during the write.
    second = SpoolWriter(tmp_path)
    assert second.next == 3
    second.append(RoundBegan(2, 1, 0.0, coordinates=True))
    second.append(step(7))
    for each in (reader, SpoolReader(tmp_path)):
        each.look()
        assert (each.end, each.behind, [begun.round for begun in each.begun]) == (5, 3, [2])
        assert steps(each) == [2, 7]


@pytest.mark.parametrize("left", [40, 0, None], ids=["some", "none", "not even the file"])
def test_after_a_power_failure_that_took_shipped_records_new_ones_are_shipped(tmp_path: Path, left: int | None) -> None:
    """The cursor is replaced, which reaches the disk sooner than appended data."""
    first = SpoolWriter(tmp_path)
    for number in range(100):
        first.append(step(number))
    SpoolReader(tmp_path).shipped(100)
    (segment,) = tmp_path.glob("*.jsonl")
    if left is None:
        segment.unlink()
    else:
        segment.write_bytes(b"".join(segment.read_bytes().splitlines(keepends=True)[:left]))
    second = SpoolWriter(tmp_path)
    for number in range(100, 150):
        second.append(step(number, round=2))
    reader = SpoolReader(tmp_path)
    reader.look()
    assert reader.behind == 50
    assert steps(reader) == list(range(100, 150))
    assert reader.dropped == 0
    assert SpoolWriter(tmp_path).next == 150


def test_the_oldest_records_go_when_it_is_full_and_are_counted(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path, segment_bytes=500, most_bytes=2000), SpoolReader(tmp_path)
    for number in range(200):
        writer.append(step(number))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= 2000
    reader.look()
    remaining_steps = steps(reader)
    assert remaining_steps == list(range(remaining_steps[0], 200))
    assert reader.dropped == remaining_steps[0] > 0
    assert reader.end == 200


def test_a_volume_that_takes_nothing_loses_records_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = SpoolWriter(tmp_path / "file" / "spool")
    writer.append(step(1))
    assert (writer.next, writer.failed) == (0, "the spool can't be written: Not a directory")


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path), SpoolReader(tmp_path)
    writer.append(step(1))
    (segment,) = tmp_path.glob("*.jsonl")
    segment.write_bytes(segment.read_bytes() + b"strange\n")
    SpoolWriter(tmp_path).append(step(2))
    assert [(number, record is None) for number, record in reader.read(9)] == [(0, False), (1, True), (2, False)]
