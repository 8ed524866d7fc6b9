"""JSON decoder and encoder that accept deeply nested objects.

The API server stores objects with ten thousand levels of nesting. Python's JSON decoder fails at a tenth of this depth,
so one such object would make a whole list unreadable. kopf copies decoded objects, and fails at an even smaller depth.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json, to_json

DEEPEST = 100
"""Largest number of nesting levels in decoded values.

A pod in a template in an object in a list has about 20 levels.
"""
LEFT_OUT = "nested too deeply"
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]')
"""Strings and brackets in JSON text.

An unfinished string extends to the end of the text, so it is scanned only once.
"""


def loads(text: str | bytes) -> Any:
    """Decode JSON like json.loads, but in half the time. Replace values that are nested too deeply by LEFT_OUT."""
    try:
        return _loads_whole(text)
    except RecursionError:
        return _loads_cut(_cut(text))


def dumps(value: Any) -> bytes:
    """Encode JSON like json.dumps without spaces, in a third of the time."""
    try:
        return to_json(value)
    except ValueError:  # half of a surrogate pair, which only the json module can escape
        return json.dumps(value, separators=(",", ":")).encode()


def cut(text: bytes) -> bytes:
    """Return JSON text in which values below DEEPEST levels of nesting are replaced by LEFT_OUT.

    Raises:
        ValueError: When brackets are unbalanced.
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
    except ValueError:  # the text is nested too deeply for from_json, or is not JSON
        return json.loads(text)


def _loads_cut(without: str) -> Any:
    """Decode `without`, the JSON text from which `cut` has removed values that are nested too deeply.

    Raises:
        ValueError: When the text is not JSON.
    """
    try:
        return json.loads(without)
    except RecursionError as error:  # unbalanced brackets make the computed depth wrong
        raise ValueError("nested too deeply, or not JSON") from error


def _is_deep(decoded: Any) -> bool:
    """Return whether a decoded value has more than DEEPEST levels of nesting.

    The check goes through the value level by level. For values that are not deep, which are most, it is ten times as
    fast as a scan of the JSON text.
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
