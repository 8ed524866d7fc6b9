"""Messages as lines of JSON.

A line is {"kind": name, "body": fields}. If the protocol has versions, the line also has {"v": version}. The name of a
kind is part of the protocol, so it stays the same even if the class of the message is renamed. The module uses the
standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Optional

from concertina_protocol.codec.typed_json import ProtocolError, from_json, to_json


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """Encoder and decoder of the messages of one protocol."""

    kinds: Mapping[str, type[Any]]
    """Message classes, which are dataclasses, keyed by the name of the message in lines."""
    what: str
    """Name of the protocol for error messages."""
    version: Optional[int] = None
    """Version of the protocol, or None if lines have no version.

    The versions just before and after it are accepted too.
    """
    most: Optional[int] = None
    """Maximum length of a line in bytes, or None for no limit."""

    @functools.cached_property
    def _names(self) -> Mapping[type[Any], str]:
        return {kind: name for name, kind in self.kinds.items()}

    def encode(self, message: Any) -> bytes:
        """Return a message as one line, including the newline.

        Raises:
            ProtocolError: If the line is too long.
        """
        kind = self._names[type(message)]
        head = {} if self.version is None else {"v": self.version}
        frame = {**head, "kind": kind, "body": to_json(message)}
        line = json.dumps(frame, separators=(",", ":")).encode()
        if self.most is not None and len(line) >= self.most:
            raise ProtocolError(f"a {kind} of {len(line)} bytes exceeds the limit of {self.most}")
        return line + b"\n"

    def decode(self, line: bytes, cut: Callable[[Any], Any] = lambda body: body) -> Any:
        """Return the message in one line.

        Args:
            line: Line to decode.
            cut: Function that shortens long lists in the parsed JSON of the body, before values are converted.

        Raises:
            ProtocolError: If the line is not a valid message. The error's text is a sentence.
        """
        try:
            frame = json.loads(line)
            version, kind, body = frame.get("v"), self.kinds[frame["kind"]], frame["body"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"not a message of {self.what}: {line[:80]!r}") from error
        if self.version is not None and version not in (self.version - 1, self.version, self.version + 1):
            raise ProtocolError(
                f"protocol version {version!s:.20} is not supported: this side has version {self.version} and "
                "supports one version more or less"
            )
        return from_json(kind, cut(body))
