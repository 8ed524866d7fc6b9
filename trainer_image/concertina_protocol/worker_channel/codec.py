"""Conversion between a message and a line of the worker channel."""

from __future__ import annotations

import typing
from typing import Union

from concertina_protocol.codec.lines import JsonLines
from concertina_protocol.worker_channel import tracker_messages, uploader_messages, worker_messages

Message = Union[worker_messages.Message, uploader_messages.Message, tracker_messages.Message]
KINDS = {**worker_messages.KINDS, **uploader_messages.KINDS, **tracker_messages.KINDS}
_LINES = JsonLines(KINDS, "the worker channel")


def encode(message: Message) -> bytes:
    """Return a message as one line, including the newline."""
    return _LINES.encode(message)


def decode(line: bytes) -> Message:
    """Return the message in one line.

    Raises:
        ProtocolError: If the line is not a valid message. The error's text is a sentence.
    """
    return typing.cast(Message, _LINES.decode(line))
