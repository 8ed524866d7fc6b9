"""Conversion of texts to tokens in the same way as in the build of a run's data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from concertina_data.data_manifest import DataManifest
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.chat_template import ASSISTANT, ChatTemplate, parse
from concertina_trainer.data.defaults import BYTES
from concertina_trainer.data.tokenizer_file import plain_tokenizer, special_tokens
from concertina_trainer.export import tokenizer_files

_ENCODING = "utf-8"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Conversion of texts to tokens and back."""

    size: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    """Tokens that end a text."""
    chat: Callable[[str], str] | None
    """Function that returns the text of a chat with one question to the assistant, or None without a chat template."""


def read_vocabulary(folder: ObjectPrefix, manifest: DataManifest) -> Vocabulary:
    """Return the vocabulary of a folder of data.

    Raises:
        InvalidInput: When the tokenizer or the chat template is missing or has changed, or the tokenizer can't convert
            tokens to texts.
        StorageError: When storage can't be read.
    """
    facts = manifest.tokenizer
    if facts.digest == BYTES:
        ends = frozenset({facts.separator})
        return Vocabulary(manifest.vocab_size, lambda text: list(text.encode(_ENCODING)), _text_of_bytes, ends, None)
    if not facts.name.endswith(".json"):
        raise InvalidInput(
            f"the data were built with the tokenizer {facts.name}, and texts are generated with bytes or a "
            "tokenizer.json alone: export the model instead."
        )
    file = tokenizer_files.tokenizer_json(folder, facts)
    tokenizer, special = plain_tokenizer(file), special_tokens(file)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    template, ends = read_template(folder, manifest), frozenset({facts.separator})
    if template is None:
        return Vocabulary(manifest.vocab_size, encode, tokenizer.decode, ends, None)
    turn = encode(_turn(template))
    ends |= {*[token for token in turn if token in special.values()][-1:]}
    return Vocabulary(manifest.vocab_size, encode, tokenizer.decode, ends, lambda text: asked(template, text))


def read_template(folder: ObjectPrefix, manifest: DataManifest) -> ChatTemplate | None:
    """Return the chat template with which data were built, or None if they were built without one.

    Raises:
        InvalidInput: When the template is missing, or differs from the one that the data were built with.
        StorageError: When storage can't be read.
    """
    if manifest.chats is None or not manifest.chats.template:
        return None
    text = tokenizer_files.template_file(folder, manifest.chats)
    return parse(text, None, f"{folder.uri}/{tokenizer_files.CONFIG}")


def asked(template: ChatTemplate, text: str) -> str:
    """Return the text of a chat in which the user says `text`, up to the beginning of the assistant's answer."""
    return template.render([{"role": "user", "content": text}], asks=True)


def _turn(template: ChatTemplate) -> str:
    """Return the template's text of an example turn of the assistant.

    The text of the messages before the turn is left out, if it can be separated.
    """
    messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}]
    return template.render(messages).removeprefix(asked(template, "?"))


def _text_of_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(_ENCODING, errors="replace")
