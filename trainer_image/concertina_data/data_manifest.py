"""The manifest of a data set: its shards, their sizes and checksums."""

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
"""The format where elements are no tokens."""
VALIDATION = "validation"
"""The folder, below the training data, of documents set aside."""
TOO_SHORT = "no shard of {uri} is as long as one sequence of {length} tokens."


@dataclasses.dataclass(frozen=True)
class TokenShard:
    file: str
    tokens: int
    size: int
    """Bytes."""
    sha256: str
    """Names the content; `crc32` is what every use is checked by."""
    crc32: int
    documents_file: str
    """Where each document begins, in tokens: little-endian uint64."""
    documents: int
    documents_sha256: str


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    name: str
    digest: str
    separator: int
    """The token that ends each document."""


@dataclasses.dataclass(frozen=True)
class FrameFacts:
    """Of data that are frames of features: a token is one then."""

    width: int
    """Numbers of a frame."""
    number_bytes: int
    """2 or 4: float16 or float32, little-endian."""
    classes: int = 0
    """After its numbers each frame has a target below this, uint32; 0: none has."""

    def __str__(self) -> str:
        targets = f" with {self.classes} targets" if self.classes else ""
        return f"float{8 * self.number_bytes} x {self.width}{targets}"


@dataclasses.dataclass(frozen=True)
class DataManifest:
    format: int
    token_bytes: int
    """Bytes of a token: 1, 2 or 4, little-endian."""
    vocab_size: int
    tokenizer: TokenizerFacts
    shards: tuple[TokenShard, ...]
    frames: Optional[FrameFacts] = None  # noqa: UP045 (typed_json knows typing's form)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def digest(self) -> str:
        """Names the content: the same data has the same digest wherever it lies."""
        shards = [[s.tokens, s.sha256, s.documents_sha256] for s in self.shards]
        content: list[object] = [self.token_bytes, self.vocab_size, self.tokenizer.digest, shards]
        if self.frames is not None:
            content.append(dataclasses.astuple(self.frames))
        return short_digest(json.dumps(content).encode())

    def sequences(self, length: int) -> list[int]:
        """How many sequences of `length` tokens to predict each shard holds (the token before the first is input)."""
        return [max(0, (shard.tokens - 1) // length) for shard in self.shards]

    def to_json(self) -> bytes:
        fields = dataclasses.asdict(self)
        if self.frames is None:  # as before there were any
            del fields["frames"]
        return json.dumps({**fields, "digest": self.digest}, indent=1).encode()


def short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(mode: str, digests: Sequence[str], weights: Sequence[int]) -> str:
    """Names data sets, given by their manifests' digests, and how sequences are made of them."""
    if len(digests) == 1 and mode == "joined":
        return digests[0]
    return short_digest(json.dumps([mode, list(zip(digests, weights, strict=True))]).encode())


def parse(text: bytes, uri: str) -> DataManifest:
    """Raises InvalidInput with a sentence."""
    try:
        value = json.loads(text)
        wanted = OF_FRAMES if isinstance(value, dict) and "frames" in value else FORMAT
        if isinstance(value, dict) and value.get("format", wanted) != wanted:
            raise InvalidInput(
                f"{uri}/{NAME} has format {value['format']!s:.80} and {wanted} is what is read here: build it again."
            )
        manifest = from_json(DataManifest, value)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{uri}/{NAME} is not a data manifest ({error}): build the data again with `concertina data build`."
        ) from error
    if value.get("digest") != manifest.digest:
        raise InvalidInput(
            f"{uri}/{NAME} has digest {value.get('digest')!s:.80} but its content gives {manifest.digest}: it was "
            "changed after it was built. Build the data again, or fetch the manifest again."
        )
    return manifest
