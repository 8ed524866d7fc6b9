"""Contamination check: search of the training documents for n-grams (n consecutive words) of evaluation files.

A word is a run of letters and digits, in lower case. Bytes beyond ASCII count as letters. Each n-gram is represented by
a 64-bit polynomial hash, and all hashes of a document are computed at once. In 10^12 comparisons with 10^6 n-grams,
about 0.05 match by chance. The default of 13 words is the value of Brown et al. 2020 (appendix C).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from concertina_state.errors import InvalidInput
from concertina_trainer.data.batch_order import mix
from concertina_trainer.data.build.find import find_evaluation
from concertina_trainer.data.build.recipe import Overlap, Recipe
from concertina_trainer.data.build.sources import cut, read_documents

_Hashes = NDArray[np.uint64]
_BASE = np.uint64(0x9E3779B97F4A7C15 | 1)
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))
_NEXT = np.uint64(0xD1B54A32D192ED03)

_EXAMPLES = 20
"""Maximum number of documents whose beginning the report shows."""
_EXAMPLE_BYTES = 200


def _letters() -> NDArray[np.uint8]:
    """Return a table that maps each byte to its lower-case letter, or to 0 if the byte separates words."""
    letters = [
        chr(b).lower().encode("latin-1")[0] if chr(b).isalnum() and b < 128 else b * (b >= 128) for b in range(256)
    ]
    return np.array(letters, dtype=np.uint8)


_LETTERS = _letters()


@functools.lru_cache(maxsize=2)
def _powers(base: np.uint64, count: int) -> _Hashes:
    return np.concatenate([np.ones(1, np.uint64), np.full(count - 1, base).cumprod(dtype=np.uint64)])


def word_hashes(text: bytes) -> _Hashes:
    """Return a hash of each word of a text."""
    letters = _LETTERS[np.frombuffer(text, np.uint8)]
    edges = np.flatnonzero(np.diff((letters != 0).astype(np.int8), prepend=0, append=0))
    begins, ends = edges[::2], edges[1::2]
    size = 1 << max(12, len(letters).bit_length())
    sums = np.concatenate(
        [np.zeros(1, np.uint64), np.cumsum(letters * _powers(_BASE, size)[: len(letters)], dtype=np.uint64)]
    )
    return mix((sums[ends] - sums[begins]) * _powers(_INVERSE, size)[begins])


def ngrams(text: bytes, count: int) -> _Hashes:
    """Return a hash of each n-gram of a text: each run of `count` consecutive words.

    A text of fewer than `count` words has no n-gram.
    """
    words = word_hashes(text)
    total = len(words) - count + 1
    if total <= 0:
        return np.empty(0, np.uint64)
    result = np.zeros(total, np.uint64)
    for offset in range(count):
        result = result * _NEXT + words[offset : offset + total]
    return result


@functools.lru_cache(maxsize=1)
def _evaluation(recipe: Recipe) -> list[tuple[str, list[_Hashes]]]:
    """Return, for each evaluation file, its location and the n-grams of each of its documents.

    Raises:
        InvalidInput: When an evaluation file can't be read.
    """
    column = recipe.against_column or recipe.column
    try:
        return [
            (
                source.location,
                [
                    ngrams(text, recipe.ngram)
                    for piece in cut(source, 2**30, (column,))
                    for text in read_documents(piece, column)
                ],
            )
            for source in find_evaluation(recipe.against)
        ]
    except InvalidInput as error:  # the message names the option for training data: correct it
        raise InvalidInput(str(error).replace("--column", "--against-column")) from error


@functools.lru_cache(maxsize=1)
def _table(recipe: Recipe) -> _Hashes:
    grams = [gram for _, texts in _evaluation(recipe) for gram in texts]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *grams]))


def _places(grams: _Hashes, table: _Hashes) -> NDArray[np.int64]:
    """Return the indices in the sorted `table` of the n-grams that are also in `grams`."""
    if not len(table):
        return np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(table, grams), len(table) - 1)
    return np.unique(places[table[places] == grams])


class Search:
    """Search for the n-grams (n consecutive words) of the evaluation files in training documents."""

    def __init__(self, recipe: Recipe) -> None:
        self._table, self._length = _table(recipe), recipe.ngram
        self._matched: set[int] = set()
        self._documents = 0
        self._examples: list[str] = []

    def search(self, text: bytes) -> bool:
        """Return whether a text has an n-gram of the evaluation files. If so, also count the text."""
        places = _places(ngrams(text, self._length), self._table)
        if not len(places):
            return False
        self._documents += 1
        if len(self._examples) < _EXAMPLES:
            self._examples.append(text[:_EXAMPLE_BYTES].decode(errors="replace"))
        self._matched.update(places.tolist())
        return True

    def found(self) -> Overlap:
        return Overlap(self._documents, tuple(sorted(self._matched)), tuple(self._examples))


def report(recipe: Recipe, overlaps: Sequence[Overlap], documents: int) -> dict[str, object]:
    """Return the report of the search: counts for each evaluation file, and examples of training documents.

    `documents` is the number of training documents with an n-gram of the evaluation files. If duplicates were removed,
    this number is lower than the sum of the numbers in `overlaps`.
    """
    table = _table(recipe)
    matched = np.zeros(len(table), bool)
    for overlap in overlaps:
        matched[list(overlap.ngrams)] = True
    files = []
    for location, texts in _evaluation(recipe):
        places = [_places(grams, table) for grams in texts]
        every = np.unique(np.concatenate([np.empty(0, np.int64), *places]))
        files.append(
            {
                "file": location,
                "documents": len(texts),
                "tooShort": sum(not len(grams) for grams in texts),
                "documentsFound": sum(bool(matched[indices].any()) for indices in places),
                "ngrams": len(every),
                "ngramsFound": int(matched[every].sum()),
            }
        )
    examples = [*dict.fromkeys(example for overlap in overlaps for example in overlap.examples)][:_EXAMPLES]
    return {"ngram": recipe.ngram, "trainingDocuments": documents, "examples": examples, "files": files}
