"""What a build of a data set is asked for, and what it reports of overlaps with evaluation files."""

from __future__ import annotations

import dataclasses

from concertina_data.data_manifest import FrameFacts
from concertina_trainer.data import frames as elements
from concertina_trainer.data import tokenizer as tokenizers


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
class Overlap:
    """Of one shard: which of the evaluation's n-grams it has, and in how many documents."""

    documents: int = 0
    ngrams: tuple[int, ...] = ()
    """Their places in the sorted table of all that are looked for."""
