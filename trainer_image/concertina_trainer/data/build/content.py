"""Detection of a file's format from its first bytes, and decompression of files while they are read."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.file_names import COMPRESSIONS

HEAD_BYTES = 4096
"""Number of bytes at the beginning of a file that are examined."""
_UNPACKED_BYTES = 2**20
"""Maximum number of decompressed bytes in memory, not counting the line that is being read."""
_MAGIC = [
    (re.compile(pattern, re.DOTALL), name)
    for pattern, name in (
        (rb"\x1f\x8b", "gzip"),
        (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "bzip2"),
        (rb"\xfd7zXZ\0", "xz"),
        (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "Zstandard"),
        (rb"\x04\x22\x4d\x18", "LZ4"),
        (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive"),
        (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
        (rb"Rar!\x1a\x07", "a rar archive"),
        (rb".{257}ustar", "a tar archive"),
        (rb"PAR1\x15|PARE\x15", "Parquet"),
        (rb"ARROW1\0|\xff\xff\xff\xff", "Arrow"),
        (rb"\x93NUMPY", "a NumPy array"),
        (rb"SQLite format 3\0", "an SQLite database"),
        (rb"\x89HDF\r\n\x1a\n", "HDF5"),
        (rb"Obj\x01", "Avro"),
        (rb"WARC/\d", "a WARC file"),
        (rb"[^\0]{1,4}\0{4,7}\{", "safetensors"),
        (rb"\x80[\x02-\x05]", "a pickle"),
        (rb"%PDF-\d", "a PDF"),
        (rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a", "an image"),
        (rb"\x7fELF", "a program"),
        (rb"GGUF\x03", "GGUF"),
    )
]
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def container_of(head: bytes) -> str:
    """Return the name of the binary format of a file that begins with the bytes `head`, or "" for other files."""
    return next((name for pattern, name in _MAGIC if pattern.match(head)), "")


def why_not_text(head: bytes, complete: bool) -> str:
    """Return why a file that begins with `head` is not text in UTF-8, as the end of a sentence, or "" if it is text.

    Set `complete` if `head` is the whole file. In that case, an incomplete character at the end is a reason, too.
    """
    if name := container_of(head):
        suffix = next((suffix for suffix, value in COMPRESSIONS.items() if value == name), "")
        advice = f"give it a name that ends in {suffix}" if suffix else "unpack or convert it"
        return f"holds {name}, not text: {advice}."
    if head.startswith(_UTF_16) or _alternates_with_nul(head[:HEAD_BYTES]):
        return "looks like UTF-16: convert it to UTF-8."
    if (nul := head.find(b"\0")) >= 0:
        return (
            f"holds NUL bytes (the first is byte {nul}), like a binary file, or a text file after a crash: "
            "restore it, or leave it out with --pattern."
        )
    try:
        codecs.utf_8_decode(head, "strict", complete)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start} is {head[error.start]:#04x}): convert it to UTF-8."
    return ""


def _alternates_with_nul(head: bytes) -> bool:
    """Return whether the bytes look like UTF-16 or UTF-32 text whose characters are mostly ASCII."""
    even, odd = head[::2], head[1::2]
    return any(
        zeros and zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.6 * len(others)
        for zeros, others in ((even, odd), (odd, even))
    )


@contextlib.contextmanager
def unpacked(file: BinaryIO, compression: str, location: str) -> Iterator[BinaryIO]:
    """Yield a stream of the decompressed contents of a file.

    If the file consists of several compressed members or frames, the stream contains all of them.

    Raises:
        InvalidInput: When the file is incomplete or damaged, or has another compression.

    Only a small part of the contents is in memory at any time.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if (name := container_of(head)) != compression:
        finding = f"holds {name}" if name else "is empty" if not head else f"does not begin like a {compression} file"
        raise InvalidInput(
            f"{location} {finding}, but its name says {compression}: rename it to fit its content, or restore it."
        )
    try:
        with _OPEN[compression](file) as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason, advice = str(error).rstrip("."), "the file is cut off or damaged: fetch it again"
        if "too much memory" in reason:
            advice = "compress it again with a window of at most 128 MiB (zstd --long=27)"
        raise InvalidInput(f"{location} can't be unpacked ({reason}): {advice}.") from error


class _Members(io.RawIOBase):
    """Stream of the decompressed contents of consecutive bzip2 or xz members.

    The standard library's classes are not used, because they treat a damaged member as the end of the file.
    """

    def __init__(self, file: BinaryIO, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self._file, self._make, self._member = file, make, make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._member.eof:
                data = self._member.unused_data or self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not data:
                    return 0
                self._member = self._make()
            elif self._member.needs_input:
                data = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not data:
                    raise EOFError("the compressed data end too early")
            if content := self._member.decompress(data, len(buffer)):
                buffer[: len(content)] = content
                return len(content)


def _zstandard(file: BinaryIO) -> BinaryIO:
    import pyarrow

    return _buffered(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))


def _buffered(raw: Any) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(raw, _UNPACKED_BYTES))


_OPEN: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "gzip": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    "bzip2": lambda file: _buffered(_Members(file, bz2.BZ2Decompressor)),
    "xz": lambda file: _buffered(_Members(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ))),
    "Zstandard": _zstandard,
}
