"""Options of a build, and the result of its search for overlaps with evaluation files."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from concertina_data.data_manifest import TOKEN, WEIGHT, Field, token_field
from concertina_state.errors import InvalidInput
from concertina_trainer.data import defaults, elements
from concertina_trainer.data import tokenizer as tokenizers

if TYPE_CHECKING:
    from concertina_trainer.data.chat_template import ChatTemplate


class Duplicates(enum.StrEnum):
    kept = "keep"
    counted = "count"
    removed = "remove"


@dataclasses.dataclass(frozen=True)
class ChatRecipe:
    """Options of a build whose documents are chats, or prompts with completions."""

    length: int
    """Maximum number of tokens that a document predicts: `trainer.model.sequenceLength`.

    The end of a document with more predicted tokens is cut off.
    """
    split_turns: bool = False
    """Whether each turn of the assistant becomes a document, with the messages before it."""


@dataclasses.dataclass(frozen=True)
class TypedRecipe:
    """Options of a build whose documents consist of numbers instead of text."""

    fields: tuple[Field, ...]
    columns: tuple[str, ...]
    """Name of the source column for each field."""
    vocab_size: int = 0
    """Upper bound (exclusive) of token ids, or 0 if documents have no token ids."""

    @classmethod
    def of(cls, tokens: str, vocab_size: int, more: tuple[Field, ...]) -> TypedRecipe:
        """Return the recipe for token ids in the column `tokens` and for the fields `more`.

        Without token ids, `tokens` is "".

        Raises:
            InvalidInput: When token ids have no vocabulary size, or two fields have the same name.
        """
        if bool(tokens) != bool(vocab_size):
            raise InvalidInput(
                "--tokens and --vocab-size go together: give both, or neither if there are no token ids."
            )
        fields = (*((token_field(vocab_size),) if tokens else ()), *more)
        names = [field.name for field in fields]
        if len(set(names)) < len(names) or TOKEN in names[bool(tokens) :]:
            raise InvalidInput(f"the fields are {', '.join(names)}: give each field once, and token ids with --tokens.")
        return cls(fields, (*((tokens,) if tokens else ()), *(field.name for field in more)), vocab_size)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Options of a build. Together with the sources, they determine the bytes of the data set."""

    tokenizer: str = defaults.BYTES
    separator: str = ""
    split_pattern: str = ""
    column: str = defaults.COLUMN
    validation: float = 0.0
    """Share of the documents that become validation data. A hash of a document's text decides."""
    duplicates: Duplicates = Duplicates.kept
    """Whether documents that occur more than once are kept, counted or removed."""
    against: tuple[str, ...] = ()
    """Evaluation files whose n-grams are searched for in the training documents."""
    ngram: int = defaults.NGRAM
    """Number of words of the n-grams by which evaluation texts are found in training documents (see `against`)."""
    against_column: str = ""
    """Column of the evaluation files that contains the text. If it is "", `column` is used."""
    typed: TypedRecipe | None = None
    """Options of documents that consist of numbers, or None for other documents."""
    chats: ChatRecipe | None = None
    """Options of documents that are chats, or None for other documents."""

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        """Load the tokenizer. If the chat template has an end token, the tokenizer ends each chat with it.

        Raises:
            InvalidInput: When the tokenizer can't be used.
        """
        if self.typed is not None:
            return elements.as_tokenizer(self.typed.fields, self.typed.vocab_size)
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

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the source columns from which documents are made."""
        return self.typed.columns if self.typed is not None else (self.column,)

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of an element of a document."""
        if self.typed is not None:
            return self.typed.fields
        token = token_field(self.load_tokenizer().vocab_size)
        return (token, Field(WEIGHT, "uint8")) if self.chats is not None else (token,)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Result of the search for evaluation n-grams in the documents of one input of a build."""

    documents: int = 0
    ngrams: tuple[int, ...] = ()
    """Indices of the n-grams that were found, in the sorted table of all n-grams of the evaluation files."""
    examples: tuple[str, ...] = ()
    """Beginnings of some of these documents."""
