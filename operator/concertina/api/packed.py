"""Compact text for values whose size grows with the job: JSON, compressed with zlib, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from pydantic import JsonValue

MOST_CHARACTERS = 262_144
_MOST_BYTES = 32 * 1024 * 1024
"""Maximum size of an unpacked value.

Otherwise, a client that may write a status could make the operator run out of memory.
"""


def pack(value: JsonValue) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Return the value from its packed text.

    Raises:
        ValueError: When the text is invalid, incomplete, or larger than allowed after unpacking.
    """
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if not unpacking.eof:
            raise ValueError("cut off, or too long")
        return json.loads(data)
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"nothing packed: {error}") from error
