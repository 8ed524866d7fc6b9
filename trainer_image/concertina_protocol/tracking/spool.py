"""The spool: lines in segments, `<first number>.jsonl`, of which the writer keeps so many bytes in all. A record's
number is the segment's and its place in it; so a reader needs one number to know where it was.

One process writes, another one reads; neither waits for the other. Nothing is synced: the volume outlives processes and
containers. Where its node loses power, the last records may be gone and the reader's cursor beyond what is left:
numbers go on from it. Standard library only, Python 3.9+.
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
"""Of a segment, and of all: some fifty thousand steps."""
ENDING = ".jsonl"
CURSOR = "shipped"


def folder(volume: Path) -> Path:
    return volume / "tracking"


class SpoolWriter:
    """Appends. What it can't write is lost, and counted: training goes on without."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._segment_bytes, self._most_bytes = folder, segment_bytes, most_bytes
        self._file: Optional[int] = None
        self._size = 0
        """Of the segment that is written."""
        self.next = _cursor(folder)
        """Number of the next record."""
        with contextlib.suppress(OSError):
            for segment in _segments(folder)[-1:]:
                self.next = max(self.next, segment.first + segment.path.read_bytes().count(b"\n"))
        self.failed = ""
        """Why the last record was lost."""

    def append(self, record: Record) -> None:
        line = encode(record)
        try:
            if self._file is None or self._size + len(line) > self._segment_bytes:
                self._begin_segment()
            assert self._file is not None
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError("no space is left for it")
            self._size += written
            self.next += 1
            self.failed = ""
        except OSError as error:
            self.failed = f"the spool can't be written: {error.strerror or error}"
            self.close()  # a line that was cut short stays the last of its segment, and is none

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
    first: int
    """Number of its first record."""
    path: Path


def _segments(folder: Path) -> list[Segment]:
    """In order."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.name.endswith(ENDING) and path.stem.isdigit():
                found.append(Segment(int(path.stem), path))
    return sorted(found, key=lambda segment: segment.first)


class SpoolReader:
    """Reads from the record after the last one that was shipped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.next = _cursor(folder)
        """Number of the first record that is not shipped."""
        self.dropped = 0
        """Records that the writer gave up before they were shipped."""
        self.end = self.next
        """Number after the last record."""
        self.begun: list[RoundBegan] = []
        """Rounds that have begun, as far as the spool still tells."""
        self._scanned = (-1, 0)
        """Up to where it was looked for those: a segment, and bytes of it."""

    @property
    def behind(self) -> int:
        """Records that are not shipped."""
        return max(0, self.end - self.next)

    def look(self) -> None:
        """What is new: how many there are, and which rounds have begun."""
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
        """The next records, at most so many, with their numbers. None: a line that can't be read."""
        segments = _segments(self._folder)
        if segments and segments[0].first > self.next:
            self.dropped += segments[0].first - self.next
            self.next = segments[0].first
        found: list[tuple[int, Optional[Record]]] = []
        for number, line in self._lines(segments):
            found.append((number, _record(line)))
            if len(found) == most:
                break
        return found

    def shipped(self, up_to: int) -> None:
        """All before this number; survives this process."""
        self.next = up_to
        draft = self._folder / f"{CURSOR}.new"
        draft.write_text(str(up_to))
        draft.replace(self._folder / CURSOR)

    def _lines(self, segments: list[Segment]) -> Iterator[tuple[int, bytes]]:
        """From `next` on."""
        for segment, after in zip(segments, [*segments[1:], None]):
            if after is not None and after.first <= self.next:
                continue
            lines, _ = _whole_lines(segment.path, 0)
            for place, line in enumerate(lines):
                if segment.first + place >= self.next:
                    yield segment.first + place, line


def _cursor(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / CURSOR).read_text())
    return 0


def _record(line: bytes) -> Optional[Record]:
    with contextlib.suppress(ProtocolError):
        return decode(line)
    return None


def _whole_lines(path: Path, begin: int) -> tuple[list[bytes], int]:
    """From that byte on, and their bytes; none where the segment is gone."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(begin)
        whole, found, _ = file.read().rpartition(b"\n")
        return (whole.split(b"\n"), len(whole) + 1) if found else ([], 0)
    return [], 0
