"""Options of the build of a data set, and its report of overlaps with evaluation files."""

from __future__ import annotations

import dataclasses

from concertina_data.data_manifest import FrameFacts
from concertina_trainer.data import defaults
from concertina_trainer.data import frames as elements
from concertina_trainer.data import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything beside the sources that determines the bytes of the result."""

    tokenizer: str = defaults.BYTES
    separator: str = ""
    split_pattern: str = ""
    column: str = defaults.COLUMN
    validation: float = 0.0
    """Share of the documents that are set aside, by the hash of their text."""
    against: tuple[str, ...] = ()
    """Evaluation files whose n-grams are searched for."""
    ngram: int = defaults.NGRAM
    """Words of an n-gram."""
    against_column: str = ""
    """Column of the evaluation files; "" means `column`."""
    frames: FrameFacts | None = None
    """Format of the frames, if documents are arrays."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        if self.frames is not None:
            return elements.as_tokenizer(self.frames)
        return tokenizers.load(self.tokenizer, self.separator, self.split_pattern)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """N-grams of the evaluation that one shard has, and the number of its documents that have them."""

    documents: int = 0
    ngrams: tuple[int, ...] = ()
    """Indices of the n-grams in the sorted table of all of them."""
