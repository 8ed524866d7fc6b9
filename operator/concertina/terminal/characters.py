"""Characters that must not reach a terminal: tenants wrote much of what commands show."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, apart from tabs and line breaks; also those that turn the
direction of a text around."""
INSTEAD = "\ufffd"


def harmless(text: str) -> str:
    """Replace each control character by one that shows where it was."""
    return CONTROL.sub(INSTEAD, text)
