"""Chat template of a tokenizer, which turns the messages of a chat into one text.

A template is a Jinja program that comes with a model, so it runs in Jinja's sandbox. A template gets the same variables
as in transformers (https://huggingface.co/docs/transformers/chat_templating), with one exception: it can't read the
date, so that the same command builds the same bytes on any day.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from concertina_data.data_manifest import short_digest
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.defaults import CHAT_TEMPLATE
from concertina_trainer.data.rangefile import split

_SOURCE_FILE = "chat_template.jinja"
"""File in a model's folder that contains only the template. It takes precedence over CHAT_TEMPLATE."""
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKS = "_marks"
_PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points without a meaning (a private-use area of Unicode), for marks in a text."""
ASSISTANT = "assistant"
Message = Mapping[str, Any]
Span = tuple[int, int]
"""Range of characters of a text: the index of the first character, and the index after the last one."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Text of a chat, with the spans of its trained parts, which are turns of the assistant."""

    text: str
    spans: tuple[Span, ...]


class _Generation(Extension):
    """The block `generation` of a template, which encloses what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, context: Context, caller: Macro) -> str:
        before, after = context.get(_MARKS) or ("", "")
        return f"{before}{caller()}{after}"


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Chat template, with the special tokens that it can use."""

    source: str
    tokens: Mapping[str, str]
    """Texts of the special tokens, keyed by name (such as `eos_token`)."""

    @property
    def file(self) -> bytes:
        """Contents of the file CHAT_TEMPLATE in a folder of data, which records this template."""
        return json.dumps({"chat_template": self.source, **self.tokens}, indent=1).encode()

    @property
    def digest(self) -> str:
        return short_digest(self.file)

    @functools.cached_property
    def _template(self) -> Any:
        """Compiled template.

        Raises:
            InvalidInput: When the template can't be compiled.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise InvalidInput(f"the chat template has an error in line {error.lineno}: {error.message}.") from error

    def render(
        self, messages: Sequence[Message], tools: object = None, asks: bool = False, marks: Sequence[str] = ()
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: Messages of the chat, each with `role` and `content`.
            tools: Tools that the assistant can call, as the template expects them.
            asks: Whether to end the text with the beginning of an assistant's turn, so that a model continues it.
            marks: Two strings that are put around each block `generation`.

        Raises:
            InvalidInput: When the template can't render the messages.
        """
        variables = {**self.tokens, "messages": messages, "tools": tools, "documents": None, _MARKS: marks}
        try:
            return str(self._template.render(**variables, add_generation_prompt=asks))
        except InvalidInput:
            raise
        except Exception as error:  # the template is a program, which can raise any error
            raise InvalidInput(
                f"the chat template can't render it ({type(error).__name__}: {str(error)[:300]}): correct the messages."
            ) from error

    def rendered(self, messages: Sequence[Message], tools: object = None) -> Rendered:
        """Return the text of a chat, and the spans of the assistant's turns with a weight other than 0.

        Raises:
            InvalidInput: When the template can't render the messages, or the spans can't be determined.
        """
        weights = [message.get("weight", 1) for message in messages if message["role"] == ASSISTANT]
        text, spans = (self._marked if _GENERATION.search(self.source) else self._by_prefixes)(messages, tools)
        if all(weights):
            return Rendered(text, tuple(spans))
        if len(spans) != len(weights):
            raise InvalidInput(
                f"it has {len(weights)} turns of the assistant, and the chat template marks {len(spans)} parts, so the "
                "field weight can't be used: remove it."
            )
        return Rendered(text, tuple(span for span, weight in zip(spans, weights, strict=True) if weight))

    def turns(self, messages: Sequence[Message], tools: object = None) -> list[Rendered]:
        """Return one text for each turn of the assistant: the chat up to and including that turn.

        In each text, only the last turn of the assistant is trained.

        Raises:
            InvalidInput: When the template can't render the messages, or the spans can't be determined.
        """
        found = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT and message.get("weight", 1):
                span = self._turn(messages, number, tools)
                found.append(Rendered(self.render(messages[: number + 1], tools), (span,)))
        return found

    def _marked(self, messages: Sequence[Message], tools: object) -> tuple[str, list[Span]]:
        """Return the text, and the spans of the blocks `generation` of the template.

        Raises:
            InvalidInput: When the template changes the text of such a block, or nests the blocks.
        """
        used = {*json.dumps([messages, tools], ensure_ascii=False), *self.source}
        free = (mark for mark in map(chr, _PRIVATE) if mark not in used)
        before, after = next(free), next(free)
        plain, marked = self.render(messages, tools), self.render(messages, tools, marks=(before, after))
        parts = re.split(f"([{before}{after}])", marked)
        if "".join(parts[::2]) != plain or parts[1::2] != [before, after] * (len(parts) // 4):
            raise InvalidInput(
                "the chat template changes or nests its blocks {% generation %}, so the assistant's turns can't be "
                "found: correct the template."
            )
        spans, end = [], 0
        for outside, inside in zip(parts[:-1:4], parts[2::4], strict=True):
            begin = end + len(outside)
            end = begin + len(inside)
            spans.append((begin, end))
        return plain, spans

    def _by_prefixes(self, messages: Sequence[Message], tools: object) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the span (range of characters) of each assistant's turn in the text.

        A turn's span is the text that is added when the turn is added to the messages before it.

        Raises:
            InvalidInput: When the text up to a turn is not the beginning of the whole text.
        """
        text = self.render(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                begin, end = self._turn(messages, number, tools)
                if not text.startswith(self.render(messages[: number + 1], tools)):
                    raise InvalidInput(
                        f"the chat template renders message {number + 1} differently if other messages follow (some "
                        "templates leave out earlier reasoning): build with --split-turns, or mark the assistant's "
                        "turns in the template by {% generation %}."
                    )
                spans.append((begin, end))
        return text, spans

    def _turn(self, messages: Sequence[Message], number: int, tools: object) -> Span:
        """Return the span (range of characters) of message `number` in the text of the messages up to this message.

        Raises:
            InvalidInput: When the text of the messages before this one is not the beginning of the text up to this one.
        """
        before, whole = self.render(messages[:number], tools, asks=True), self.render(messages[: number + 1], tools)
        if not whole.startswith(before):
            raise InvalidInput(
                f"the chat template asks for message {number + 1} by another text than it renders before it: mark the "
                "assistant's turns in the template by {% generation %}."
            )
        return len(before), len(whole)


def parse(config: bytes, source: bytes | None, location: str) -> ChatTemplate | None:
    """Return the template in `config` or `source`, or None if neither has one.

    `config` is the content of the file CHAT_TEMPLATE, and `source` is the content of a file that contains only the
    template.

    Raises:
        InvalidInput: When the contents can't be read.
    """
    try:
        value = json.loads(config)
        template = source.decode() if source is not None else value.get("chat_template")
        if isinstance(template, list):  # several templates by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        tokens = {name: value[name] for name in _TOKENS if value.get(name)}
        texts = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise InvalidInput(f"{location} can't be read: {error}.") from error
    return ChatTemplate(str(template), texts) if template else None


def beside(tokenizer: str) -> ChatTemplate | None:
    """Return the template in the folder of a tokenizer.json (a path or URI), or None if the folder has no template.

    Raises:
        InvalidInput: When the files can't be read.
    """
    folder = split(tokenizer)[0]
    config, source = _read(folder, CHAT_TEMPLATE), _read(folder, _SOURCE_FILE)
    if config is None and source is None:
        return None
    return parse(config or b"{}", source, f"{folder}/{CHAT_TEMPLATE}")


def _read(folder: str, name: str) -> bytes | None:
    if "://" in folder:
        return ObjectPrefix(folder).get(name)
    path = Path(folder, name)
    return path.read_bytes() if path.is_file() else None
