"""Shards of one input of a build: its documents, tokenized, and those set aside in shards of their own."""

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
"""Documents that are tokenized at once."""


@dataclasses.dataclass(frozen=True)
class ShardInput:
    """Input of one process: it becomes one shard, or several if its text is larger than estimated.

    Its fields are part of the key that names a build.
    """

    index: int
    pieces: tuple[Piece, ...]
    size: int
    """Approximate bytes of text."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Shards that a ShardInput became."""

    training: tuple[TokenShard, ...]
    validation: tuple[TokenShard, ...]
    overlap: Overlap


class Draft:
    """Shard under construction."""

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

    Each is written as soon as its text is large enough, so that memory holds one.
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
        """Write the last shard, and return all of them."""
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
    """Write the shards of an input below `uri`, and those of documents set aside below its folder `aside`.

    One shard holds about `shard_bytes` of text. `check` is called before each write. It raises if another build has
    taken over the folder meanwhile.
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
    """Return whether a document is set aside, which its own content decides.

    Copies of a document, wherever they are, have the same result.
    """
    return share > 0 and int.from_bytes(hashlib.sha256(text).digest()[:8]) < share * 2**64


def _batches(texts: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
    while batch := list(itertools.islice(texts, _BATCH)):
        yield batch
