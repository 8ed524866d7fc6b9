"""Tokenizer from a tokenizer.json, for texts that contain the texts of special tokens, such as rendered chats."""

from __future__ import annotations

import json

from tokenizers import Tokenizer


def plain_tokenizer(file: bytes) -> Tokenizer:
    """Return a tokenizer that neither adds tokens to a text nor truncates it.

    Where a text contains the text of a special token, the result contains that special token. Each token's offsets are
    positions in the given text, because no post-processor changes them.
    """
    plain = {"truncation": None, "padding": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps({**json.loads(file), **plain}))


def special_tokens(file: bytes) -> dict[str, int]:
    """Return the ids of the special tokens, keyed by the token's text."""
    return {token["content"]: token["id"] for token in json.loads(file)["added_tokens"] if token["special"]}
