"""What a script has imported, written down as it does: a line for each module, in the file that the next parent reads.

A line is JSON: the module's name and the variables that the script had changed by then, as packages read variables when
they are imported (the parent sets them, too, before it imports); null where it was not imported after all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

MOST_MODULES, MOST_BYTES = 10_000, 4 << 20


@dataclasses.dataclass(frozen=True)
class Imported:
    name: str
    changes: Mapping[str, Optional[str]] = dataclasses.field(default_factory=dict)
    """Variables that the script had set, or removed (None), before."""

    @property
    def line(self) -> str:
        return json.dumps([self.name, self.changes])

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


class Recorder:
    """The first of the script's finders: it finds nothing, and so sees each module that is looked for. One that was
    only asked about, and not imported, is taken back when the next one comes; from then on it is written only once it
    is seen to be imported, as some are asked about at each step, and some at each start: a file that grew by them would
    have another parent import everything again. What is written there already is known."""

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._given = dict(os.environ)
        self._last = ""
        self._changes: dict[str, Optional[str]] = {}
        known = _last_said(path)
        self._asked = {name for name, said in known.items() if said is None}
        """Were taken back."""
        self._seen = known.keys() - self._asked

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None, target: object = None) -> None:
        if os.getpid() != self._pid or len(self._seen) >= MOST_MODULES:
            return
        self._settle()
        package = name.partition(".")[0]
        if name in self._seen or package in getattr(sys, "stdlib_module_names", ()):
            return
        if name == package:
            self._changes = self._changed()
        self._seen.add(name)
        self._last = name
        if name not in self._asked:
            self._write(name, self._changes)

    def _settle(self) -> None:
        """Whether the one before was imported shows now."""
        name, self._last = self._last, ""
        if not name:
            return
        if name in sys.modules:
            if name in self._asked:
                self._write(name, self._changes)
            return
        self._seen.discard(name)
        if name not in self._asked:
            self._asked.add(name)
            self._write(name, None)

    def _write(self, name: str, changes: Optional[Mapping[str, Optional[str]]]) -> None:
        line = json.dumps([name, changes]).encode() + b"\n"
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, line)
            finally:
                os.close(file)

    def _changed(self) -> dict[str, Optional[str]]:
        now = dict(os.environ)
        names = [*now, *(name for name in self._given if name not in now)]
        return {name: now.get(name) for name in names if now.get(name) != self._given.get(name)}


def read(path: str) -> list[Imported]:
    """In the order in which they were imported; empty where nothing is written. A line that can't be read, such
    as one that is half written or comes from elsewhere, is passed over."""
    return [said for said in _last_said(path).values() if said is not None]


def lines_to_tell(path: str) -> str:
    """Lines from which another replica goes on as this one would; what was taken back is among them."""
    said = _last_said(path).items()
    return "".join(f"{each.line if each else json.dumps([name, None])}\n" for name, each in said)


def _last_said(path: str) -> dict[str, Optional[Imported]]:
    """By name; None: taken back."""
    found: dict[str, Optional[Imported]] = {}
    with contextlib.suppress(OSError), open(path, "rb") as lines:
        for line in lines.read(MOST_BYTES).splitlines()[:MOST_MODULES]:
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                name, changes = json.loads(line)
                if changes is None:
                    found[name] = None
                elif (
                    found.get(name) is None
                    and _is_module(name)
                    and all(_is_variable(*each) for each in changes.items())
                ):
                    found.pop(name, None)  # its place is behind those that were imported meanwhile
                    found[name] = Imported(name, changes)
    return found


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _is_variable(name: str, value: object) -> bool:
    """One that can be set, or removed."""
    can_be_value = value is None or (isinstance(value, str) and "\0" not in value)
    return can_be_value and bool(name) and not set("=\0") & set(name)
