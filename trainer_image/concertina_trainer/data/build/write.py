"""One shard of a build: the documents of its input, tokenized, and those set aside into another shard."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from concertina_data.manifest import FrameFacts, TokenShard
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data import frames as elements
from concertina_trainer.data import tokenizer as tokenizers
from concertina_trainer.data.build import arrays
from concertina_trainer.data.build.sources import Piece, read_documents

_BATCH = 256
"""Documents tokenized at once."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What, beside the sources, decides the bytes of the result."""

    tokenizer: str = tokenizers.BYTES
    separator: str = ""
    split_pattern: str = ""
    column: str = "text"
    validation: float = 0.0
    """Share of the documents that are set aside, by the hash of their text."""
    against: tuple[str, ...] = ()
    """Evaluation files whose n-grams are looked for."""
    ngram: int = 13
    """Words."""
    against_column: str = ""
    """Of the evaluation files; "": `column`."""
    frames: FrameFacts | None = None
    """Where documents are arrays."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        if self.frames is not None:
            return elements.as_tokenizer(self.frames)
        return tokenizers.load(self.tokenizer, self.separator, self.split_pattern)


@dataclasses.dataclass(frozen=True)
class ShardInput:
    """What becomes one shard. (Its fields are part of the key that names a build.)"""

    index: int
    pieces: tuple[Piece, ...]
    size: int
    """Bytes of text, about."""


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Of one shard: which of the evaluation's n-grams it has, and in how many documents."""

    documents: int = 0
    ngrams: tuple[int, ...] = ()
    """Their places in the sorted table of all that are looked for."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What became of a ShardInput: at most one shard of each kind."""

    training: tuple[TokenShard, ...]
    validation: tuple[TokenShard, ...]
    overlap: Overlap


class Draft:
    """A shard as it grows."""

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


def write(source: ShardInput, uri: str, aside: str, recipe: Recipe, check: Callable[[], None]) -> Written:
    """Write a shard below `uri` and, of what is set aside, below its folder `aside`. `check`: raises where nothing may
    be written any more, which the work before it takes long enough for."""
    tokenizer = recipe.load_tokenizer()
    seen = _search(recipe)
    training, validation = Draft(), Draft()
    texts = (text for piece in source.pieces for text in _documents(piece, recipe) if text)
    for batch in _batches(texts):
        for text, tokens in zip(batch, tokenizer.encode(batch), strict=True):
            if set_aside(text, recipe.validation):
                validation.documents.append(tokens)
            else:
                training.documents.append(tokens)
                if seen is not None:
                    seen.search(text)
    name = f"shard-{source.index:06}"
    found = seen.found() if seen is not None else Overlap()
    check()
    kept = training.put(ObjectPrefix(uri, create=True), name, tokenizer.token_bytes)
    if not validation.documents:
        return Written(kept, (), found)
    put = validation.put(ObjectPrefix(f"{uri}/{aside}", create=True), name, tokenizer.token_bytes)
    return Written(kept, put, found)


def _documents(piece: Piece, recipe: Recipe) -> Iterator[bytes]:
    if recipe.frames is None:
        return read_documents(piece, recipe.column)
    return iter([arrays.document(piece.source, recipe.frames)])


def set_aside(text: bytes, share: float) -> bool:
    """By the document's own content: copies of it, wherever they are, go the same way."""
    return share > 0 and int.from_bytes(hashlib.sha256(text).digest()[:8]) < share * 2**64


def _batches(texts: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
    while batch := list(itertools.islice(texts, _BATCH)):
        yield batch


def _search(recipe: Recipe):  # type: ignore[no-untyped-def]
    if not recipe.against:
        return None
    from concertina_trainer.data.build.overlap import Search

    return Search(recipe)
