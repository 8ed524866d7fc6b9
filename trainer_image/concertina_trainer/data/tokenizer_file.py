"""Tokenizer of a tokenizer.json for texts in which special tokens are written out, as in rendered chats."""

from __future__ import annotations

import json

from tokenizers import Tokenizer


def plain_tokenizer(file: bytes) -> Tokenizer:
    """Return a tokenizer that converts a text only to the text's own tokens: it adds none, and does not truncate.

    If the text contains the text of a special token, the special token is used. Each token's offsets are positions in
    the given text, because no post-processor changes them.
    """
    plain = {"truncation": None, "padding": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps({**json.loads(file), **plain}))


def special_tokens(file: bytes) -> dict[str, int]:
    """Return the ids of the special tokens, by text."""
    return {token["content"]: token["id"] for token in json.loads(file)["added_tokens"] if token["special"]}
