"""A line of the worker channel, from a message and back."""

from __future__ import annotations

import typing
from typing import Union

from concertina_protocol.codec.lines import JsonLines
from concertina_protocol.worker_channel import tracker, uploader, worker

Message = Union[worker.Message, uploader.Message, tracker.Message]
KINDS = {**worker.KINDS, **uploader.KINDS, **tracker.KINDS}
_LINES = JsonLines(KINDS, "the worker channel")


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return _LINES.encode(message)


def decode(line: bytes) -> Message:
    """The message in one line; raises ProtocolError with a sentence."""
    return typing.cast(Message, _LINES.decode(line))
