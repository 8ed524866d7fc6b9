"""Defaults of the options of a build, in a module of their own, so that `--help` does not import numpy."""

from __future__ import annotations

BYTES = "bytes"
"""Name of the tokenizer that has one token for each byte."""
CHAT_TEMPLATE = "tokenizer_config.json"
"""Name of the file with the chat template and special tokens, in a model's folder and in a folder of data."""
COLUMN = "text"
NGRAM = 13
"""Number of words of an n-gram."""
SHARD_BYTES = 64 << 20
"""Size in bytes of the text of a shard."""
