"""Defaults of a build, which `--help` shows: apart from the code that needs numpy."""

from __future__ import annotations

BYTES = "bytes"
"""Name of the tokenizer that takes each byte for a token."""
COLUMN = "text"
NGRAM = 13
"""Words of an n-gram."""
SHARD_BYTES = 64 << 20
"""Bytes of text in a shard."""
