"""JSON of the API server, whatever a tenant has nested in it.

The API server stores what is nested ten thousand levels deep. Python's decoder gives up at a tenth of that, on the
whole list that one such object stands in; kopf, which copies what it has decoded, even earlier."""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100
"""Levels that are kept; a pod in a template in an object in a list has some 20."""
LEFT_OUT = "nested too deeply"
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def loads(text: str | bytes) -> Any:
    """As json.loads; where that gives up, as shallow_loads."""
    try:
        return json.loads(text)
    except RecursionError:
        return shallow_loads(text)


def shallow_loads(text: str | bytes) -> Any:
    """With LEFT_OUT in the place of what is nested deeper than DEEPEST."""
    decoded = text.decode() if isinstance(text, bytes) else text
    kept, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(decoded):
        if token[0] in "[{":
            depth += 1
            if depth == DEEPEST + 1:
                kept.append(decoded[begin : token.start()])
        elif token[0] in "]}":
            depth -= 1
            if depth == DEEPEST:
                kept.append(json.dumps(LEFT_OUT))
                begin = token.end()
    return json.loads("".join([*kept, decoded[begin:]]))
