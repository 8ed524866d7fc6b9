"""Control characters that must not reach a terminal. Tenants wrote much of what commands show."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal interprets instead of showing them, apart from tabs and line breaks.

Characters that change the direction of text are among them.
"""
INSTEAD = "\ufffd"


def harmless(text: str) -> str:
    """Replace each control character by one that shows where it was."""
    return CONTROL.sub(INSTEAD, text)
