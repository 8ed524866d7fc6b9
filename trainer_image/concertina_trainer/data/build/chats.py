"""Documents that are chats (`messages`), or prompts with completions, in files of JSON lines.

Only the turns of the assistant, or the completions, are trained. The whole text is tokenized at once. A token is
trained if at least one of its characters belongs to a trained part.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from concertina_data.data_manifest import TOKEN, WEIGHT
from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.file_names import JSON_LINES
from concertina_trainer.data.build.recipe import Recipe
from concertina_trainer.data.build.records import kind
from concertina_trainer.data.build.sources import Line, Piece, read_lines
from concertina_trainer.data.chat_template import ASSISTANT, Rendered
from concertina_trainer.data.elements import joined
from concertina_trainer.data.tokenizer_file import plain_tokenizer, special_tokens

_BATCH = 256
"""Number of lines to tokenize at once."""
_CHAT, _PROMPT = "messages", ("prompt", "completion")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Document with a weight for each token."""

    line: bytes
    """Line that the sample is made of."""
    text: bytes
    elements: bytes
    """Tokens and weights in the format of a shard, or b"" if no token is trained."""
    trained: int
    """Number of trained tokens."""
    truncated: bool


def read_samples(pieces: Sequence[Piece], recipe: Recipe) -> Iterator[Sample]:
    """Yield the samples of the lines of these pieces.

    Raises:
        InvalidInput: When a line can't be used. The message names the file and the line number.
    """
    encoder = Encoder(recipe)
    lines = itertools.chain.from_iterable(map(_lines, pieces))
    while batch := list(itertools.islice(lines, _BATCH)):
        yield from encoder.samples(batch)


def _lines(piece: Piece) -> Iterator[Line]:
    if piece.source.format != JSON_LINES:
        raise InvalidInput(
            f"{piece.source.location} is not a file of JSON lines, and chats are read from no other: convert it, or "
            "choose files by --pattern."
        )
    return read_lines(piece)


class Encoder:
    """Conversion of lines of JSON to samples, which are tokens with weights."""

    def __init__(self, recipe: Recipe) -> None:
        """Load the tokenizer and its chat template.

        Raises:
            InvalidInput: When the tokenizer or the template can't be used.
        """
        assert recipe.chats is not None
        self._tokenizer, self._template = recipe.load_tokenizer(), recipe.chat_template()
        self._name, self._options, self._fields = recipe.tokenizer, recipe.chats, recipe.fields()
        self._plain, special = plain_tokenizer(self._tokenizer.file), special_tokens(self._tokenizer.file)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def samples(self, lines: Sequence[Line]) -> Iterator[Sample]:
        """Yield the samples of some lines.

        Raises:
            InvalidInput: When a line can't be used.
        """
        rendered = [(line, text, ends) for line in lines for text, ends in self._rendered(line)]
        encodings = self._plain.encode_batch([text.text for _, text, _ in rendered], add_special_tokens=False)
        for (line, text, ends), encoding in zip(rendered, encodings, strict=True):
            yield self._sample(line.content, text, encoding, ends)

    def _rendered(self, line: Line) -> list[tuple[Rendered, bool]]:
        """Return the texts of a line. The bool is True if the separator token has to be added after the text.

        Raises:
            InvalidInput: When the line can't be used.
        """
        record = line.record()
        if record is None:
            return []
        try:
            if _CHAT in record:
                return [(text, False) for text in self._chat(record)]
            return [(_completion(record), True)]
        except InvalidInput as error:
            raise InvalidInput(f"{line.locate()}: {error}") from error

    def _chat(self, record: Mapping[str, Any]) -> Sequence[Rendered]:
        if self._template is None:
            raise InvalidInput(
                f"{self._name} has no chat template: put the model's tokenizer_config.json (or chat_template.jinja) "
                "beside it."
            )
        messages, tools = record[_CHAT], record.get("tools")
        _check(messages, self._special)
        if self._options.split_turns:
            return self._template.turns(messages, tools)
        return [self._template.rendered(messages, tools)]

    def _sample(self, line: bytes, text: Rendered, encoding: Encoding, ends: bool) -> Sample:
        tokens, weights = encoding.ids, in_spans(encoding.offsets, text.spans)
        if ends:
            tokens, weights = [*tokens, self._tokenizer.separator], np.append(weights, True)
        most = self._options.length + 1
        truncated = len(tokens) > most
        tokens, weights = tokens[:most], weights[:most]
        weights[:1] = False  # no token is before it, so it is not predicted
        trained = int(weights.sum())
        elements = joined({TOKEN: tokens, WEIGHT: weights}, self._fields) if trained else b""
        return Sample(line, text.text.encode(errors="replace"), elements, trained, truncated)


def in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return for each token whether it overlaps one of the spans.

    `offsets` contains the range of characters of each token.
    """
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    found = np.zeros(len(begins), bool)
    for begin, end in spans:
        found |= (begins < end) & (ends > begin)
    return found


def _completion(record: Mapping[str, Any]) -> Rendered:
    if not all(name in record for name in _PROMPT):
        raise InvalidInput(
            f"it has no {_CHAT}, nor prompt and completion, but {', '.join([*record][:20])[:300] or 'nothing'}: rename "
            "its fields."
        )
    prompt, completion = (record[name] for name in _PROMPT)
    for name, value in zip(_PROMPT, (prompt, completion), strict=True):
        if not isinstance(value, str):
            raise InvalidInput(f"its {name} is a {kind(value)}, not text: write text, or the whole chat as {_CHAT}.")
    return Rendered(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))


def _check(messages: object, special: re.Pattern[str] | None) -> None:
    """Check the messages of a chat.

    Raises:
        InvalidInput: When a message does not have the form that templates expect, or no message is from the assistant.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidInput(f"its {_CHAT} is a {kind(messages)} without messages: write a list of objects.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"message {number} is no object with a role: write role and content of each message.")
        if not isinstance(message.get("content"), str | None):
            raise InvalidInput(f"the content of message {number} is a {kind(message['content'])}: write it as text.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise InvalidInput(f"message {number} has neither content nor tool_calls: write its content.")
        if message.get("weight", 1) not in (0, 1):
            raise InvalidInput(f"the weight of message {number} is neither 0 nor 1: correct it.")
        texts = (value for value in message.values() if isinstance(value, str))
        found = special and next(filter(None, map(special.search, texts)), None)
        if found:
            raise InvalidInput(
                f"message {number} has the text {found[0]}, which the tokenizer takes for a special token: remove it."
            )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise InvalidInput(f"no message has the role {ASSISTANT}, so nothing is trained: remove the line.")
