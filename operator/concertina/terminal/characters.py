"""Replacement of control characters in text before it is printed. Tenants of the cluster wrote much of this text."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters that a terminal would interpret, except tabs and line breaks.

They include characters that change the direction of text.
"""
INSTEAD = "\ufffd"


def harmless(text: str) -> str:
    """Return the text with each control character replaced by U+FFFD."""
    return CONTROL.sub(INSTEAD, text)
