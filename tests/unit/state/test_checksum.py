"""Checksum that several threads compute: it equals zlib's."""

import os
import zlib

import pytest

from concertina_state.checksum import LEAST, crc32


@pytest.mark.parametrize("size", [0, 1, LEAST, LEAST + 1, 2 * LEAST + 5, 3 * LEAST - 1])
def test_of_threads(size):
    data = memoryview(os.urandom(size))
    assert {crc32(data, threads) for threads in (1, 2, 3, 4)} == {zlib.crc32(data)}
