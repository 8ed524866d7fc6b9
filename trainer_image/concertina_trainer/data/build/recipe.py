"""Options of a build, and the result of its search for overlaps with evaluation files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from concertina_data.data_manifest import FrameFacts
from concertina_state.errors import InvalidInput
from concertina_trainer.data import defaults
from concertina_trainer.data import frames as elements
from concertina_trainer.data import tokenizer as tokenizers

if TYPE_CHECKING:
    from concertina_trainer.data.chat_template import ChatTemplate


@dataclasses.dataclass(frozen=True)
class ChatRecipe:
    """Options of a build whose documents are chats, or prompts with completions."""

    length: int
    """Most tokens that a document predicts: `trainer.model.sequenceLength`. The end of a longer document is cut off."""
    split_turns: bool = False
    """Whether each turn of the assistant becomes a document, with the messages before it."""


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
    """Format of the frames (feature vectors, such as audio) if documents are arrays, or None if they are text."""
    chats: ChatRecipe | None = None
    """Options of chats, or None if documents are something else."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """Load the tokenizer. If the chat template has an end token, the tokenizer ends each chat with it.

        Raises:
            InvalidInput: When the tokenizer can't be used.
        """
        if self.frames is not None:
            return elements.as_tokenizer(self.frames)
        template = self.chat_template()
        separator = self.separator or (template.tokens.get("eos_token", "") if template else "")
        return tokenizers.load(self.tokenizer, separator, self.split_pattern)

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template beside the tokenizer, or None if there is none or documents are not chats.

        Raises:
            InvalidInput: When the template can't be read, or the tokenizer is not a tokenizer.json.
        """
        if self.chats is None:
            return None
        if not self.tokenizer.endswith(".json"):
            raise InvalidInput(f"chats need a tokenizer.json, and --tokenizer is {self.tokenizer}: name the model's.")
        from concertina_trainer.data.chat_template import beside  # needs jinja2

        return beside(self.tokenizer)

    def element_bytes(self) -> int:
        """Return how many bytes an element takes in a shard.

        An element is a token with its weight in the loss, if the data have weights, or a frame (a vector of features).
        """
        return self.load_tokenizer().token_bytes + (self.chats is not None)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Result of the search for evaluation n-grams in the documents of one input of a build."""

    documents: int = 0
    ngrams: tuple[int, ...] = ()
    """Indices of the n-grams that were found, in the sorted table of all n-grams of the evaluation files."""
