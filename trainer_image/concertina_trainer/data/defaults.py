"""Defaults of the options of a build, in a module of their own, so that `--help` does not import numpy."""

from __future__ import annotations

BYTES = "bytes"
"""Name of the tokenizer whose tokens are bytes."""
CHAT_TEMPLATE = "tokenizer_config.json"
"""File with the chat template and the special tokens, in a folder of a model and in a folder of data."""
COLUMN = "text"
NGRAM = 13
"""Number of words of an n-gram."""
SHARD_BYTES = 64 << 20
"""Size in bytes of the text of a shard."""
