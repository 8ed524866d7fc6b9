"""Writing of the shards that one input of a build becomes.

Documents of the input are tokenized. Validation documents go into shards of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from concertina_data.data_manifest import TokenShard
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build import arrays
from concertina_trainer.data.build.overlap import Search
from concertina_trainer.data.build.recipe import Overlap, Recipe
from concertina_trainer.data.build.sources import Piece, read_documents

_BATCH = 256
"""Number of documents to tokenize at once."""


@dataclasses.dataclass(frozen=True)
class ShardInput:
    """Input of one process. It becomes one training shard, or several if its text is larger than estimated.

    All fields are part of the digest that identifies a build (see `build._key`).
    """

    index: int
    pieces: tuple[Piece, ...]
    size: int
    """Approximate size of the text in bytes."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Shards that a ShardInput has become."""

    training: tuple[TokenShard, ...]
    validation: tuple[TokenShard, ...]
    overlap: Overlap


class Draft:
    """Shard that is not complete yet."""

    def __init__(self) -> None:
        self.documents: list[bytes] = []

    def put(self, folder: ObjectPrefix, name: str, token_bytes: int) -> tuple[TokenShard, ...]:
        if not self.documents:
            return ()
        content = b"".join(self.documents)
        lengths = [len(document) // token_bytes for document in self.documents]
        begins = np.cumsum([0, *lengths[:-1]], dtype="<u8").tobytes()
        folder.put(f"{name}.bin", content)
        folder.put(f"{name}.documents", begins)
        shard = TokenShard(
            file=f"{name}.bin",
            tokens=len(content) // token_bytes,
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            crc32=zlib.crc32(content),
            documents_file=f"{name}.documents",
            documents=len(lengths),
            documents_sha256=hashlib.sha256(begins).hexdigest(),
        )
        return (shard,)


class ShardWriter:
    """Writer of the shards of one input.

    A shard is written as soon as its text is large enough, so only one shard is in memory.
    """

    def __init__(self, uri: str, name: str, token_bytes: int, shard_bytes: int, check: Callable[[], None]) -> None:
        self._uri, self._name, self._token_bytes = uri, name, token_bytes
        self._shard_bytes, self._check = shard_bytes, check
        self._draft, self._text_bytes = Draft(), 0
        self._written: list[TokenShard] = []

    def add(self, tokens: bytes, text_bytes: int) -> None:
        if self._text_bytes >= self._shard_bytes:
            self._put()
        self._draft.documents.append(tokens)
        self._text_bytes += text_bytes

    def finished(self) -> tuple[TokenShard, ...]:
        """Write the last shard, and return all shards of the input."""
        if self._draft.documents:
            self._put()
        return tuple(self._written)

    def _put(self) -> None:
        name = f"{self._name}-{len(self._written):04}" if self._written else self._name
        self._check()
        self._written += self._draft.put(ObjectPrefix(self._uri, create=True), name, self._token_bytes)
        self._draft, self._text_bytes = Draft(), 0


def write(
    source: ShardInput, uri: str, aside: str, recipe: Recipe, shard_bytes: int, check: Callable[[], None]
) -> Written:
    """Write the training shards of an input to `uri`, and its validation shards to the folder `aside` in `uri`.

    A shard contains about `shard_bytes` of text. `check` is called before each write, and raises an error if another
    build is now writing to the folder.
    """
    tokenizer = recipe.load_tokenizer()
    search = Search(recipe) if recipe.against else None
    name = f"shard-{source.index:06}"
    training, validation = (
        ShardWriter(folder, name, tokenizer.token_bytes, shard_bytes, check) for folder in (uri, f"{uri}/{aside}")
    )
    texts = (text for piece in source.pieces for text in _documents(piece, recipe) if text)
    for batch in _batches(texts):
        for text, tokens in zip(batch, tokenizer.encode(batch), strict=True):
            if set_aside(text, recipe.validation):
                validation.add(tokens, len(text))
            else:
                training.add(tokens, len(text))
                if search is not None:
                    search.search(text)
    overlap = search.found() if search is not None else Overlap()
    return Written(training.finished(), validation.finished(), overlap)


def _documents(piece: Piece, recipe: Recipe) -> Iterator[bytes]:
    if recipe.frames is None:
        return read_documents(piece, recipe.column)
    return iter([arrays.document(piece.source, recipe.frames)])


def set_aside(text: bytes, share: float) -> bool:
    """Return whether a document becomes validation data. The decision depends only on the document's text and `share`.

    So all copies of a document are either training data or validation data.
    """
    return share > 0 and int.from_bytes(hashlib.sha256(text).digest()[:8]) < share * 2**64


def _batches(texts: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
    while batch := list(itertools.islice(texts, _BATCH)):
        yield batch
