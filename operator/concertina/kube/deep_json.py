"""JSON of the API server, however deeply a tenant has nested it.

The API server stores objects that are nested ten thousand levels deep. Python's decoder fails at a tenth of that, for
the whole list that contains one such object. kopf, which copies decoded objects, fails even earlier.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json, to_json

DEEPEST = 100
"""Largest number of levels that are kept. A pod in a template in an object in a list has some 20."""
LEFT_OUT = "nested too deeply"
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]')
"""Token of JSON. A string that is cut off ends with the text, so it is scanned only once."""


def loads(text: str | bytes) -> Any:
    """Decode like json.loads, in half the time. When that fails, leave out the deeply nested parts."""
    try:
        return _loads_whole(text)
    except RecursionError:
        return _loads_cut(_cut(text))


def dumps(value: Any) -> bytes:
    """Encode like json.dumps, without spaces, in a third of the time."""
    try:
        return to_json(value)
    except ValueError:  # half of a surrogate pair, which JSON can escape
        return json.dumps(value, separators=(",", ":")).encode()


def cut(text: bytes) -> bytes:
    """Return the same JSON, with LEFT_OUT in place of values that are nested deeper than DEEPEST.

    Raises:
        ValueError: When unbalanced brackets hide the depth.
    """
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return text
    try:
        deep = _is_deep(_loads_whole(text))
    except RecursionError:
        deep = True
    if not deep:
        return text
    without = _cut(text)
    _loads_cut(without)
    return without.encode()


def _loads_whole(text: str | bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:  # nested too deeply for it, or not JSON
        return json.loads(text)


def _loads_cut(without: str) -> Any:
    """Decode JSON whose deep values were cut.

    Raises:
        ValueError: When it is not JSON.
    """
    try:
        return json.loads(without)
    except RecursionError as error:  # unbalanced brackets hide the depth
        raise ValueError("nested too deeply, and no JSON") from error


def _is_deep(decoded: Any) -> bool:
    """Return whether the decoded value is nested deeper than DEEPEST.

    It is checked level by level. Most values are not deep, and this is ten times as fast as scanning the text.
    """
    level: list[Any] = [[decoded]]
    for _ in range(DEEPEST + 1):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _cut(text: str | bytes) -> str:
    decoded = text.decode() if isinstance(text, bytes) else text
    pieces, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(decoded):
        if token[0] in "[{":
            depth += 1
            if depth == DEEPEST + 1:
                pieces.append(decoded[begin : token.start()])
        elif token[0] in "]}":
            depth -= 1
            if depth == DEEPEST:
                pieces.append(json.dumps(LEFT_OUT))
                begin = token.end()
    return "".join([*pieces, decoded[begin:]])
