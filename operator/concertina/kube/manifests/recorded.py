"""Job spec in the form that checkpoints store as part of their lineage. All functions are pure.

The storage may have more readers than the job has. Values of environment variables are therefore left out, whether they
are secret or not. Names and references are stored (decision "Lineage omits values of environment variables").
"""

from __future__ import annotations

import json
import re
from typing import Any

from concertina.api.spec import JobSpec

MOST = 64 << 10
"""Maximum size of the stored spec in bytes. A larger spec is not stored.

Pods get the spec in an environment variable, for which Linux allows 128 KiB.
"""
VALUED = ("env", "httpHeaders")
"""Names of fields with lists of name-value pairs. The values are left out of the stored spec."""
WITHIN_URI = re.compile(r"(?<=://)[^/@\s]+@")
"""Pattern for the user name and password in a URI."""


def recorded(spec: JobSpec) -> str:
    """Return the job's spec as JSON for a checkpoint's lineage; empty if it is too large.

    `trainer` and `checkpoint` are left out, because pods get these separately.
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
