"""The spec as it is handed on for the lineage of checkpoints. Pure.

It goes into storage that others read than those who may read the job's pods, so values of variables stay out, whether
somebody thought them secret or not: names and references remain (decision "Lineage has no values of variables").
"""

from __future__ import annotations

import json
import re
from typing import Any

from concertina.api.spec import JobSpec

MOST = 64 << 10
"""Bytes; Linux takes 128 KiB for one variable. A larger spec is not handed on."""
VALUED = ("env", "httpHeaders")
"""Lists whose entries have a name, and a value that stays out."""
WITHIN_URI = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password."""


def recorded(spec: JobSpec) -> str:
    """As JSON, without what pods are told besides: `trainer` and `checkpoint`. Empty where it is too large."""
    said = spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"trainer", "checkpoint"})
    text = json.dumps(_without_values(said), sort_keys=True, separators=(",", ":"))
    return text if len(text.encode()) <= MOST else ""


def _without_values(value: Any, within: str = "") -> Any:
    if isinstance(value, dict):
        hidden = within in VALUED and "name" in value
        return {key: _without_values(each, key) for key, each in value.items() if not (hidden and key == "value")}
    if isinstance(value, list):
        return [_without_values(each, within) for each in value]
    return WITHIN_URI.sub("", value) if isinstance(value, str) else value
