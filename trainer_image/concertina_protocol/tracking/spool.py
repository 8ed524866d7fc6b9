"""Spool: a folder in the node's volume with a run's records that wait to be sent to a tracking tool.

The spool consists of segments, which are files of lines named `<first number>.jsonl`. Records are numbered: the number
of a record is the number of its segment plus its index in that file. The position of a reader is therefore a single
number. The writer limits the total size of the segments.

One process writes and another process reads, without waiting for each other. Files are not synced to the disk, because
the volume outlives processes and containers. If the node loses power, the last records can be lost, and the reader's
stored position may be higher than the number of the last remaining record. New records then continue from the reader's
position. The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.tracking.tracking_records import Record, RoundBegan, decode, encode, is_round

SEGMENT_BYTES, MOST_BYTES = 1 << 20, 16 << 20
"""Maximum sizes in bytes of a segment and of the whole spool. The spool has space for about fifty thousand steps."""
ENDING = ".jsonl"
CURSOR = "shipped"


def folder(volume: Path) -> Path:
    """Return the folder of the spool in a volume."""
    return volume / "tracking"


class SpoolWriter:
    """Writer that appends records to the spool.

    If a record cannot be written, it is counted as lost, and training continues.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._segment_bytes, self._most_bytes = folder, segment_bytes, most_bytes
        self._file: Optional[int] = None
        self._size = 0
        """Size in bytes of the segment that is being written."""
        self.next = _cursor(folder)
        """Number of the record that will be written next."""
        with contextlib.suppress(OSError):
            for segment in _segments(folder)[-1:]:
                self.next = max(self.next, segment.first + segment.path.read_bytes().count(b"\n"))
        self.failed = ""
        """Reason why the last record was lost, or ""."""

    def append(self, record: Record) -> None:
        line = encode(record)
        try:
            if self._file is None or self._size + len(line) > self._segment_bytes:
                self._begin_segment()
            assert self._file is not None
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError("there is no space left for it")
            self._size += written
            self.next += 1
            self.failed = ""
        except OSError as error:
            self.failed = f"the spool can't be written: {error.strerror or error}"
            self.close()  # a truncated line remains at the end of its segment, and readers ignore it

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None

    def _begin_segment(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        older = _segments(self._folder)
        room = self._most_bytes - self._segment_bytes
        for segment in reversed(older):
            room -= segment.path.stat().st_size
            if room < 0:
                segment.path.unlink()
        path = self._folder / f"{self.next:012d}{ENDING}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._size = 0


@dataclasses.dataclass(frozen=True)
class Segment:
    """File of the spool that contains consecutive records."""

    first: int
    """Number of the segment's first record."""
    path: Path


def _segments(folder: Path) -> list[Segment]:
    """Return the segments of a folder in order."""
    segments = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.name.endswith(ENDING) and path.stem.isdigit():
                segments.append(Segment(int(path.stem), path))
    return sorted(segments, key=lambda segment: segment.first)


class SpoolReader:
    """Reader of the spool. It begins after the last record that was marked as sent to the tracking tool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.next = _cursor(folder)
        """Number of the first record that has not been sent to the tracking tool."""
        self.dropped = 0
        """Number of records that the writer deleted before they were sent."""
        self.end = self.next
        """Number of the record that the writer will write next."""
        self.begun: list[RoundBegan] = []
        """Records of rounds that have begun, if the spool still contains these records."""
        self._scanned = (-1, 0)
        """Position up to which the spool was scanned for rounds: the number of a segment, and a number of bytes in
        it."""

    @property
    def behind(self) -> int:
        """Number of records that have not been sent yet."""
        return max(0, self.end - self.next)

    def look(self) -> None:
        """Scan the records that were written since the last call.

        The scan counts the records, and finds the rounds that have begun.
        """
        for segment in _segments(self._folder):
            if segment.first < self._scanned[0]:
                continue
            begin = self._scanned[1] if segment.first == self._scanned[0] else 0
            counted = self.end if begin else segment.first
            lines, size = _whole_lines(segment.path, begin)
            for line in lines:
                record = _record(line) if is_round(line) else None
                if isinstance(record, RoundBegan):
                    self.begun.append(record)
            self.end = counted + len(lines)
            self._scanned = (segment.first, begin + size)

    def read(self, most: int) -> list[tuple[int, Optional[Record]]]:
        """Return the next records with their numbers, at most `most`. A record that cannot be parsed is None."""
        segments = _segments(self._folder)
        if segments and segments[0].first > self.next:
            self.dropped += segments[0].first - self.next
            self.next = segments[0].first
        records: list[tuple[int, Optional[Record]]] = []
        for number, line in self._lines(segments):
            records.append((number, _record(line)))
            if len(records) == most:
                break
        return records

    def shipped(self, up_to: int) -> None:
        """Mark the records with lower numbers than `up_to` as sent to the tracking tool.

        The mark is stored in the spool's folder, so that a new process continues there.
        """
        self.next = up_to
        draft = self._folder / f"{CURSOR}.new"
        draft.write_text(str(up_to))
        draft.replace(self._folder / CURSOR)

    def _lines(self, segments: list[Segment]) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from record number `self.next` on, each with its number."""
        for segment, after in zip(segments, [*segments[1:], None]):
            if after is not None and after.first <= self.next:
                continue
            lines, _ = _whole_lines(segment.path, 0)
            for index, line in enumerate(lines):
                if segment.first + index >= self.next:
                    yield segment.first + index, line


def _cursor(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / CURSOR).read_text())
    return 0


def _record(line: bytes) -> Optional[Record]:
    with contextlib.suppress(ProtocolError):
        return decode(line)
    return None


def _whole_lines(path: Path, begin: int) -> tuple[list[bytes], int]:
    """Return the complete lines of a file from byte `begin` on, and their total size in bytes.

    If the file no longer exists, the result has no lines.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(begin)
        whole, newline, _ = file.read().rpartition(b"\n")
        return (whole.split(b"\n"), len(whole) + 1) if newline else ([], 0)
    return [], 0
