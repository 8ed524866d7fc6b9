"""Tokenizers: bytes, Hugging Face's `tokenizer.json`, and encodings of tiktoken."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from concertina_data.data_manifest import short_digest, token_field
from concertina_state.errors import InvalidInput
from concertina_trainer.data.defaults import BYTES
from concertina_trainer.data.rangefile import read_whole, split

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Tokens that may mark the end of a document.

The first token of this list that a tokenizer has becomes the separator.
"""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of documents.

    `encode` returns the tokens of each document as bytes, in the type of `token_field`. The last token of a document is
    the separator.
    """

    name: str
    vocab_size: int
    separator: int
    digest: str
    """Digest of everything that determines the tokens."""
    encode: Callable[[Sequence[bytes]], list[bytes]]
    file: bytes = b""
    """Contents of tokenizer.json, or empty for another kind of tokenizer."""


@functools.lru_cache(maxsize=2)
def load(name: str, separator: str = "", split_pattern: str = "") -> Tokenizer:
    """Load a tokenizer.

    `name` is `bytes`, a tokenizer.json, `tiktoken:ENCODING`, or a .tiktoken file. Only a .tiktoken file needs
    `split_pattern`. A file may be at a URI. `separator` is the text of the token that ends each document.

    Raises:
        InvalidInput: When the tokenizer can't be loaded, or has no token `separator`.
    """
    if name == BYTES:
        if separator:
            raise InvalidInput(f"the tokenizer {BYTES} ends a document with the byte 0: leave out --separator.")
        return Tokenizer(BYTES, 256, 0, BYTES, _encode_bytes)
    if name.endswith(".json"):
        return _hugging_face(name, separator)
    if name.startswith("tiktoken:") or name.endswith(".tiktoken"):
        return _tiktoken(name, separator, split_pattern)
    raise InvalidInput(f"the tokenizer {name} is none of: {BYTES}, FILE.json, tiktoken:ENCODING, FILE.tiktoken.")


def _encode_bytes(documents: Sequence[bytes]) -> list[bytes]:
    """Return the bytes of each document, followed by the separator 0.

    A byte 0 within a document is replaced by a space.
    """
    return [document.replace(b"\0", b" ") + b"\0" for document in documents]


def _hugging_face(location: str, separator: str) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # shards are processed in parallel instead
    import numpy as np  # numpy is only needed to build data, and exports use this module without it
    from tokenizers import Tokenizer as Loaded

    file = read_whole(location)
    try:
        loaded = Loaded.from_str(file.decode())
    except Exception as error:  # the library raises plain Exception
        raise InvalidInput(
            f"{location} is not a tokenizer file of the Hugging Face library tokenizers: {error}."
        ) from error
    loaded.encode_special_tokens = True  # the text of a special token within a document is ordinary text
    loaded.no_truncation()
    loaded.no_padding()
    candidates = [separator] if separator else list(_ENDS)
    end = next((token for text in candidates if (token := loaded.token_to_id(text)) is not None), None)
    if end is None:
        raise _no_separator(location, separator)
    size = max(loaded.get_vocab(with_added_tokens=True).values()) + 1
    kind = np.dtype(token_field(size).type).newbyteorder("<")

    def encode(documents: Sequence[bytes]) -> list[bytes]:
        texts = [document.decode(errors="replace") for document in documents]
        encodings = loaded.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, end], dtype=kind).tobytes() for encoding in encodings]

    return Tokenizer(split(location)[1], size, end, short_digest(file), encode, file)


def _tiktoken(name: str, separator: str, split_pattern: str) -> Tokenizer:
    import numpy as np

    encoding = _encoding_of_file(name, split_pattern) if name.endswith(".tiktoken") else _encoding(name)
    specials = encoding._special_tokens
    end = specials.get(separator or "<|endoftext|>")
    if end is None:
        raise _no_separator(name, separator)
    kind = np.dtype(token_field(encoding.n_vocab).type).newbyteorder("<")
    content = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        content.update(b"%d %b\n" % (rank, token))

    def encode(documents: Sequence[bytes]) -> list[bytes]:
        texts = (document.decode(errors="replace") for document in documents)
        return [np.array([*encoding.encode_ordinary(text), end], dtype=kind).tobytes() for text in texts]

    return Tokenizer(split(name)[1], encoding.n_vocab, end, content.hexdigest()[:16], encode)


def _encoding(name: str):  # type: ignore[no-untyped-def]
    import tiktoken

    try:
        return tiktoken.get_encoding(name.removeprefix("tiktoken:"))
    except Exception as error:  # the name is unknown, or a download failed
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise InvalidInput(
            f"{name} can't be loaded: {reason}. tiktoken downloads an encoding on first use. Without "
            "internet access, give a .tiktoken file, or set TIKTOKEN_CACHE_DIR to a folder that contains "
            "the encoding."
        ) from error


def _encoding_of_file(location: str, split_pattern: str):  # type: ignore[no-untyped-def]
    import base64

    import tiktoken

    if not split_pattern:
        raise InvalidInput(
            f"{location} does not define how text is split before tokens are merged: give --split-pattern."
        )
    try:
        lines = [line.split() for line in read_whole(location).splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        specials = {"<|endoftext|>": max(ranks.values()) + 1}
        return tiktoken.Encoding(location, pat_str=split_pattern, mergeable_ranks=ranks, special_tokens=specials)
    except ValueError as error:
        raise InvalidInput(f"{location} is not a file of tiktoken ranks: {error}.") from error


def _no_separator(name: str, separator: str) -> InvalidInput:
    description = separator or "of the usual tokens that end a document"
    return InvalidInput(f"{name} has no token {description}: name the token that ends a document with --separator.")
