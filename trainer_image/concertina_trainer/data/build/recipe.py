"""Options of a build, and the result of its search for overlaps with evaluation files."""

from __future__ import annotations

import dataclasses

from concertina_data.data_manifest import FrameFacts
from concertina_trainer.data import defaults
from concertina_trainer.data import frames as elements
from concertina_trainer.data import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Options of a build. Together with the sources, they determine the bytes of the data set."""

    tokenizer: str = defaults.BYTES
    separator: str = ""
    split_pattern: str = ""
    column: str = defaults.COLUMN
    validation: float = 0.0
    """Share of the documents that become validation data. A hash of its text decides about each document."""
    against: tuple[str, ...] = ()
    """Evaluation files whose n-grams are searched for in the training documents."""
    ngram: int = defaults.NGRAM
    """Number of words of the n-grams by which evaluation texts are found in training documents (see `against`)."""
    against_column: str = ""
    """Column of the evaluation files that contains the text. If it is "", `column` is used."""
    frames: FrameFacts | None = None
    """Format of the frames if documents are arrays, or None if they are text."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        if self.frames is not None:
            return elements.as_tokenizer(self.frames)
        return tokenizers.load(self.tokenizer, self.separator, self.split_pattern)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Result of the search for evaluation n-grams in the documents of one input of a build."""

    documents: int = 0
    ngrams: tuple[int, ...] = ()
    """Indices of the n-grams that were found, in the sorted table of all n-grams of the evaluation files."""
