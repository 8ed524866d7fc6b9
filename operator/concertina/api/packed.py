"""Compact text for values that grow with a job's size: zlib of JSON, as base64."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from pydantic import JsonValue

MOST_CHARACTERS = 262_144
_MOST_BYTES = 32 * 1024 * 1024
"""Maximum size after unpacking. Without it, anyone who may write a status could make one that unpacks endlessly."""


def pack(value: JsonValue) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Unpack a value from text.

    Raises:
        ValueError: When the text is no packed value, is cut off, or unpacks to too much.
    """
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if not unpacking.eof:
            raise ValueError("cut off, or too long")
        return json.loads(data)
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"nothing packed: {error}") from error
