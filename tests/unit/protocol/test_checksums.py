"""crc32 of a whole from those of its parts: it equals zlib's crc32 of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from concertina_protocol.checksums import followed_by


@given(st.binary(), st.binary())
def test_what_follows_is_counted_behind_what_stands_before(before: bytes, after: bytes) -> None:
    assert followed_by(zlib.crc32(before), zlib.crc32(after), len(after)) == zlib.crc32(before + after)


def test_however_long_it_is() -> None:
    """The input is a gigabyte of zeros or more. Its crc32 is computed by doubling, because reading takes a second."""
    zeros, length = zlib.crc32(b"\0"), 1
    for _ in range(40):
        assert followed_by(followed_by(7, zeros, length), zeros, length) == followed_by(
            7, followed_by(zeros, zeros, length), 2 * length
        )
        zeros, length = followed_by(zeros, zeros, length), 2 * length
        if length <= 1 << 22:
            assert zeros == zlib.crc32(bytes(length))
