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
FORMAT = 2
OF_FRAMES = 3
"""Format number of a data set that consists of frames of features instead of tokens."""
OF_CHATS = 4
"""Format number of a data set that consists of tokens with weights."""
VALIDATION = "validation"
"""Folder with the validation documents, below the folder of the training data."""
TOO_SHORT = "no shard of {uri} has as many tokens as one sequence ({length})."


@dataclasses.dataclass(frozen=True)
class TokenShard:
    """One file of a data set, with its size, checksums and number of tokens."""

    file: str
    tokens: int
    size: int
    """Size in bytes."""
    sha256: str
    """Digest that identifies the content. Reads verify `crc32`, which is faster."""
    crc32: int
    documents_file: str
    """Name of the file with the offset of each document, in tokens, as little-endian uint64."""
    documents: int
    documents_sha256: str


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    """Facts about the tokenizer that produced the tokens."""

    name: str
    digest: str
    separator: int
    """Id of the token that ends each document."""


@dataclasses.dataclass(frozen=True)
class FrameFacts:
    """Format of data whose elements are frames instead of tokens. A frame is the vector of features at one position."""

    width: int
    """Number of features per frame."""
    number_bytes: int
    """Bytes per feature, 2 or 4: float16 or float32, little-endian."""
    classes: int = 0
    """Number of target classes. If it is not 0, a uint32 with the frame's class follows the features of each frame."""

    def __str__(self) -> str:
        targets = f" with {self.classes} targets" if self.classes else ""
        return f"float{8 * self.number_bytes} x {self.width}{targets}"


@dataclasses.dataclass(frozen=True)
class ChatFacts:
    """Facts about a data set whose documents are chats, or prompts with completions.

    In the shards of such a data set, each token is followed by one byte: the token's weight in the loss, 0 or 1.
    """

    length: int
    """Most tokens that a document predicts. A document has one token more."""
    template: str = ""
    """Digest of the chat template, or "" if the tokenizer has none."""
    trained: int = 0
    """Number of tokens with weight 1."""
    truncated: int = 0
    """Number of documents whose end was cut off, so that they have no more tokens than `length` + 1."""
    dropped: int = 0
    """Number of documents that were left out, because none of their tokens has weight 1."""


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """Manifest of a data set."""

    format: int
    token_bytes: int
    """Bytes per token: 1, 2 or 4, little-endian. With `frames`, the bytes per frame; with `chats`, one byte more."""
    vocab_size: int
    tokenizer: TokenizerFacts
    shards: tuple[TokenShard, ...]
    frames: Optional[FrameFacts] = None
    chats: Optional[ChatFacts] = None

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
        content: list[object] = [self.token_bytes, self.vocab_size, self.tokenizer.digest, shards]
        content += [dataclasses.astuple(facts) for facts in (self.frames, self.chats) if facts is not None]
        return short_digest(json.dumps(content).encode())

    def sequences(self, length: int) -> list[int]:
        """Return how many sequences of `length` tokens each shard contains.

        A sequence consists of `length` tokens to predict, and the token before the first of them as input.
        """
        return [max(0, (shard.tokens - 1) // length) for shard in self.shards]

    def to_json(self) -> bytes:
        fields = dataclasses.asdict(self)
        for name in _FORMATS:  # a manifest of tokens has no such fields
            if fields[name] is None:
                del fields[name]
        return json.dumps({**fields, "digest": self.digest}, indent=1).encode()


_FORMATS = {"frames": OF_FRAMES, "chats": OF_CHATS}
"""Format number of a manifest that has a certain field."""


def short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(mode: str, digests: Sequence[str], weights: Sequence[int]) -> str:
    """Return a digest that identifies a mixture of data sets and the way in which their documents become sequences.

    `digests` has the digest of each data set's manifest.
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
        fields = value if isinstance(value, dict) else {}
        expected = next((number for name, number in _FORMATS.items() if name in fields), FORMAT)
        if isinstance(value, dict) and value.get("format", expected) != expected:
            raise InvalidInput(
                f"{uri}/{NAME} has format {value['format']!s:.80}, but this version reads format "
                f"{expected}: build the data again."
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
