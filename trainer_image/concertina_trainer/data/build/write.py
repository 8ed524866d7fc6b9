"""Writer of the shards of one input of a build. An input is a group of pieces of source files.

Documents of the input are tokenized. Validation documents go into shards of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from concertina_data.data_manifest import TokenShard
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.chat_counts import NO_CHATS, ChatCounts
from concertina_trainer.data.build.draft import Draft
from concertina_trainer.data.build.duplicates import ROW, row
from concertina_trainer.data.build.overlap import Search
from concertina_trainer.data.build.recipe import Duplicates, Overlap, Recipe
from concertina_trainer.data.build.sources import Piece, read_documents
from concertina_trainer.data.build.typed import read_elements

_BATCH = 256
"""Number of documents to tokenize at once."""


@dataclasses.dataclass(frozen=True)
class ShardInput:
    """Input of one process, which becomes one training shard, or several if its text is larger than estimated.

    All fields are part of the digest that identifies a build (see `build._key`).
    """

    index: int
    pieces: tuple[Piece, ...]
    size: int
    """Approximate size of the text in bytes."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Shards and counts into which a ShardInput was converted."""

    training: tuple[TokenShard, ...]
    validation: tuple[TokenShard, ...]
    overlap: Overlap
    training_chats: ChatCounts = NO_CHATS
    validation_chats: ChatCounts = NO_CHATS


@dataclasses.dataclass(frozen=True)
class Document:
    """Document in the format of a shard."""

    source: bytes
    """Bytes whose hash decides whether the document is training or validation data."""
    text: bytes
    """Text in which n-grams of evaluation files are searched for."""
    content: bytes
    """Tokens, or b"" if the document is dropped."""
    chats: ChatCounts = NO_CHATS
    text_bytes: int = 0
    """Size in bytes of the text from which the tokens were made.

    The value is 0 for numbers, and for chats, because the chat template adds text.
    """


class ShardWriter:
    """Writer of the shards of one input.

    A shard is written as soon as its text is large enough, so only one shard is in memory.
    """

    def __init__(self, uri: str, name: str, token_bytes: int, shard_bytes: int, check: Callable[[], None]) -> None:
        self._uri, self._name, self._token_bytes = uri, name, token_bytes
        self._shard_bytes, self._check = shard_bytes, check
        self._draft, self._text_bytes = Draft(), 0
        self._written: list[TokenShard] = []
        self.chats = NO_CHATS

    def add(self, document: Document) -> None:
        self.chats += document.chats
        if not document.content:
            return
        if self._text_bytes >= self._shard_bytes:
            self._put()
        self._draft.documents.append(document.content)
        self._draft.text_bytes += document.text_bytes
        self._text_bytes += len(document.text)

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
) -> tuple[Written, tuple[bytes, bytes]]:
    """Write the training shards of an input to `uri`, and its validation shards to the folder `aside` in `uri`.

    Return also the rows of the training documents and of the validation documents (see `duplicates.ROW`). The rows are
    empty if duplicates are neither counted nor removed.

    A shard contains about `shard_bytes` of text. `check` is called before each write, and raises an error if another
    build is now writing to the folder.
    """
    search = Search(recipe) if recipe.against else None
    name, element_bytes = f"shard-{source.index:06}", sum(field.bytes for field in recipe.fields())
    training, validation = (
        ShardWriter(folder, name, element_bytes, shard_bytes, check) for folder in (uri, f"{uri}/{aside}")
    )
    rows: tuple[list[tuple[bytes, int, int, bool, int]], ...] = ([], [])
    counts = recipe.duplicates is not Duplicates.kept
    for document in _chats(source, recipe) if recipe.chats else _texts(source, recipe):
        is_aside = set_aside(document.source, recipe.validation)
        (validation if is_aside else training).add(document)
        if not document.content:
            continue
        overlaps = search is not None and not is_aside and search.search(document.text)
        if counts:
            rows[is_aside].append(row(document.content, document.chats, overlaps, document.text_bytes))
    overlap = search.found() if search is not None else Overlap()
    written = Written(training.finished(), validation.finished(), overlap, training.chats, validation.chats)
    return written, (np.array(rows[0], ROW).tobytes(), np.array(rows[1], ROW).tobytes())


def _texts(source: ShardInput, recipe: Recipe) -> Iterator[Document]:
    tokenizer = recipe.load_tokenizer()
    texts = (text for piece in source.pieces for text in _documents(piece, recipe) if text)
    for batch in _batches(texts):
        for text, tokens in zip(batch, tokenizer.encode(batch), strict=True):
            yield Document(text, text, tokens, text_bytes=0 if recipe.typed else len(text))


def _chats(source: ShardInput, recipe: Recipe) -> Iterator[Document]:
    from concertina_trainer.data.build.chats import read_samples  # needs jinja2 and tokenizers

    for sample in read_samples(source.pieces, recipe):
        is_whole = bool(sample.elements)
        counts = ChatCounts(sample.trained, int(sample.truncated and is_whole), int(not is_whole))
        yield Document(sample.line, sample.text, sample.elements, counts)


def _documents(piece: Piece, recipe: Recipe) -> Iterator[bytes]:
    return read_elements(piece, recipe.typed) if recipe.typed else read_documents(piece, recipe.column)


def set_aside(text: bytes, share: float) -> bool:
    """Return whether a document becomes validation data. On average, the share `share` of all documents does.

    The decision depends only on the document's text and `share`. All copies of a document are therefore either training
    data or validation data.
    """
    return share > 0 and int.from_bytes(hashlib.sha256(text).digest()[:8]) < share * 2**64


def _batches(texts: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
    while batch := list(itertools.islice(texts, _BATCH)):
        yield batch
