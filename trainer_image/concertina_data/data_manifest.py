"""Manifest of a data set: its shards, their sizes and checksums."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Optional

from concertina_protocol.codec.typed_json import from_json
from concertina_state.errors import InvalidInput

NAME = "manifest.json"
FORMAT = 5
VALIDATION = "validation"
"""Folder with the validation documents, below the folder of the training data."""
TOO_SHORT = "no shard of {uri} has as many tokens as one sequence ({length})."
TOKEN = "token"
"""Name of the field with the token's id: an unsigned integer below the manifest's `vocab_size`."""
WEIGHT = "weight"
"""Name of the field with the token's weight in the loss: a whole number from 0 to 255."""
NUMBER_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8}
"""Size in bytes of a number of each type. Numbers are little-endian."""
_UNSIGNED = ("uint8", "uint16", "uint32")
MOST_WIDTH = 65536
_MOST_NAME = 100


@dataclasses.dataclass(frozen=True)
class TokenShard:
    """One file of a data set, with its size, checksums and number of tokens."""

    file: str
    tokens: int
    size: int
    """Size in bytes."""
    sha256: str
    """Digest that identifies the content. Reads verify `crc32` instead, because it is faster."""
    crc32: int
    documents_file: str
    """Name of the file with the offset of each document, in tokens, as little-endian uint64."""
    documents: int
    documents_sha256: str
    text_bytes: Optional[int] = None
    """Size in bytes of the text from which the tokens were made, or None for chats and documents without text."""


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    """Facts about the tokenizer that produced the tokens."""

    name: str
    digest: str
    separator: int
    """Id of the token that ends each document."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One value of an element. An element is the entry at one position of a shard, such as a token."""

    name: str
    type: str
    """Type of the numbers of the value: a key of NUMBER_BYTES."""
    width: int = 0
    """Length of the vector, or 0 if the value is a single number."""

    def __post_init__(self) -> None:
        """Check the name and the type of the field.

        Raises:
            ValueError: When the name or the type can't be used.
        """
        if not (0 < len(self.name) <= _MOST_NAME and self.name.isprintable()):
            raise ValueError(f"a field has the name {self.name[:_MOST_NAME]!r}")
        if self.type not in NUMBER_BYTES or not 0 <= self.width <= MOST_WIDTH:
            raise ValueError(f"the field {self.name} has the type {self.type}x{self.width}")
        types = {TOKEN: _UNSIGNED, WEIGHT: ("uint8",)}
        if self.name in types and (self.width or self.type not in types[self.name]):
            raise ValueError(
                f"the field {self.name} has the type {self}, but it must be {' or '.join(types[self.name])}"
            )

    @property
    def bytes(self) -> int:
        return NUMBER_BYTES[self.type] * max(1, self.width)

    def __str__(self) -> str:
        return f"{self.name} {self.type}" + (f"x{self.width}" if self.width else "")


def parse_field(text: str) -> Field:
    """Parse a field as users write it: `time=int64`, or `features=float16x20` for a vector of 20 numbers.

    Raises:
        ValueError: When the text has another form.
    """
    name, _, kind = text.rpartition("=")
    kind, x, width = kind.partition("x")
    if x and not width.isdecimal():
        raise ValueError(f"{width} is no width")
    return Field(name, kind, int(width or "0"))


def token_field(vocab_size: int) -> Field:
    """Return the field of token ids below `vocab_size`, in the smallest type."""
    return Field(TOKEN, next(name for name in _UNSIGNED if vocab_size <= 256 ** NUMBER_BYTES[name]))


@dataclasses.dataclass(frozen=True)
class ChatFacts:
    """Facts about a data set whose documents are chats, or prompts with completions.

    The elements of such a data set have the fields TOKEN and WEIGHT. A weight is 0 or 1.
    """

    length: int
    """Maximum number of tokens that a document predicts.

    A document can have one more token, because its first token is not predicted.
    """
    template: str = ""
    """Digest of the chat template, or "" if the tokenizer has none."""
    trained: int = 0
    """Number of tokens with weight 1."""
    truncated: int = 0
    """Number of documents that were cut off at the end, so that they have at most `length` + 1 tokens."""
    dropped: int = 0
    """Number of documents that were left out, because none of their tokens has weight 1."""


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """Manifest of a data set."""

    format: int
    vocab_size: int
    """Upper bound (exclusive) of token ids, or 0 if elements have no field TOKEN."""
    tokenizer: TokenizerFacts
    fields: tuple[Field, ...]
    """Fields of an element, in the order in which they are stored."""
    shards: tuple[TokenShard, ...]
    chats: Optional[ChatFacts] = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: When there are no fields, or two have the same name.
        """
        names = [field.name for field in self.fields]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"the fields are {', '.join(names) or 'missing'}")

    @property
    def element_bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    @property
    def only_tokens(self) -> bool:
        return [field.name for field in self.fields] == [TOKEN]

    @property
    def weighted(self) -> bool:
        return any(field.name == WEIGHT for field in self.fields)

    @property
    def more_fields(self) -> tuple[Field, ...]:
        """Fields other than the token and its weight."""
        return tuple(field for field in self.fields if field.name not in (TOKEN, WEIGHT))

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def digest(self) -> str:
        """Digest of the data set's content. It does not depend on where the data set is stored."""
        shards = [[s.tokens, s.sha256, s.documents_sha256] for s in self.shards]
        fields = [dataclasses.astuple(field) for field in self.fields]
        content: list[object] = [fields, self.vocab_size, self.tokenizer.digest, shards]
        content += [dataclasses.astuple(self.chats)] if self.chats is not None else []
        return short_digest(json.dumps(content).encode())

    def sequences(self, length: int) -> list[int]:
        """Return how many sequences of `length` tokens each shard contains.

        A sequence consists of `length` tokens to predict, and of the token before them, which is only an input.
        """
        return [max(0, (shard.tokens - 1) // length) for shard in self.shards]

    def to_json(self) -> bytes:
        fields = dataclasses.asdict(self)
        for shard in fields["shards"]:
            if shard["text_bytes"] is None:
                del shard["text_bytes"]
        if self.chats is None:
            del fields["chats"]
        return json.dumps({**fields, "digest": self.digest}, indent=1).encode()


def short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(mode: str, digests: Sequence[str], weights: Sequence[int]) -> str:
    """Return a digest that identifies a mixture of data sets and the way in which their documents become sequences.

    `digests` contains the digest of each data set's manifest.
    """
    if len(digests) == 1 and mode == "joined":
        return digests[0]
    return short_digest(json.dumps([mode, list(zip(digests, weights))]).encode())


def parse(text: bytes, uri: str) -> DataManifest:
    """Parse a manifest.

    Raises:
        InvalidInput: When the manifest is damaged, has another format, or was changed after it was built.
    """
    try:
        value = json.loads(text)
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise InvalidInput(
                f"{uri}/{NAME} has format {value['format']!s:.80}, but this version reads format "
                f"{FORMAT}: build the data again."
            )
        manifest = from_json(DataManifest, value)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{uri}/{NAME} is not a data manifest ({error}): build the data again with `concertina data build`."
        ) from error
    if value.get("digest") != manifest.digest:
        raise InvalidInput(
            f"{uri}/{NAME} has digest {value.get('digest')!s:.80} but the digest of its content is "
            f"{manifest.digest}: the manifest was changed after the build. Build the data again, or copy "
            "the manifest again."
        )
    return manifest
