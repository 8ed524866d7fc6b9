"""Messages as JSON, one a line: {"kind": name, "body": fields}, and {"v": version} where one is spoken of.

The name of a kind is part of the wire, that of its class is not. Standard library only, Python 3.9+."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Optional

from concertina_protocol.codec.typed_json import ProtocolError, from_json, to_json


@dataclasses.dataclass(frozen=True)
class JsonLines:
    kinds: Mapping[str, type[Any]]
    """Dataclasses by the names that lines have for them."""
    what: str
    """Of which protocol, in words."""
    version: Optional[int] = None
    """One more or less is understood; None: no line says one."""
    most: Optional[int] = None
    """Bytes of a line."""

    @functools.cached_property
    def _names(self) -> Mapping[type[Any], str]:
        return {kind: name for name, kind in self.kinds.items()}

    def encode(self, message: Any) -> bytes:
        """One line, newline included. Raises ProtocolError where it is too long."""
        kind = self._names[type(message)]
        head = {} if self.version is None else {"v": self.version}
        frame = {**head, "kind": kind, "body": to_json(message)}
        line = json.dumps(frame, separators=(",", ":")).encode()
        if self.most is not None and len(line) >= self.most:
            raise ProtocolError(f"a {kind} of {len(line)} bytes is over the limit of {self.most}")
        return line + b"\n"

    def decode(self, line: bytes, cut: Callable[[Any], Any] = lambda body: body) -> Any:
        """The message in one line; raises ProtocolError with a sentence. `cut`: what is left of a body, before its
        values are converted."""
        try:
            frame = json.loads(line)
            version, kind, body = frame.get("v"), self.kinds[frame["kind"]], frame["body"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"not a message of {self.what}: {line[:80]!r}") from error
        if self.version is not None and version not in (self.version - 1, self.version, self.version + 1):
            raise ProtocolError(
                f"protocol version {version!s:.20}, this side speaks {self.version}, and one more or less"
            )
        return from_json(kind, cut(body))
