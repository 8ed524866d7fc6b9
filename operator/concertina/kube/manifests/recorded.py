"""Spec as it is stored in the lineage of checkpoints. Pure.

Storage may have other readers than the job's pods, so values of variables are left out, whether they are secret or not.
Names and references remain (decision "Lineage has no values of variables").
"""

from __future__ import annotations

import json
import re
from typing import Any

from concertina.api.spec import JobSpec

MOST = 64 << 10
"""Largest size in bytes. Linux accepts 128 KiB for one variable. A larger spec is not stored."""
VALUED = ("env", "httpHeaders")
"""Lists whose entries have a name, and a value that is left out."""
WITHIN_URI = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password in a URI."""


def recorded(spec: JobSpec) -> str:
    """Return the spec as JSON, or an empty string when it is too large.

    `trainer` and `checkpoint` are left out, because pods get them separately.
    """
    fields = spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"trainer", "checkpoint"})
    text = json.dumps(_without_values(fields), sort_keys=True, separators=(",", ":"))
    return text if len(text.encode()) <= MOST else ""


def _without_values(value: Any, within: str = "") -> Any:
    if isinstance(value, dict):
        hidden = within in VALUED and "name" in value
        return {key: _without_values(child, key) for key, child in value.items() if not (hidden and key == "value")}
    if isinstance(value, list):
        return [_without_values(child, within) for child in value]
    return WITHIN_URI.sub("", value) if isinstance(value, str) else value
