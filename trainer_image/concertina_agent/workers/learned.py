"""File that lists the modules that a script imports.

Each line is JSON for one module: its name, and the environment variables that the script had changed before the import.
The parent process sets these variables too, because packages read variables when they are imported. If a line has null
instead of the variables, the module was searched for but not imported.

A parent process imports these modules before it forks workers that run the script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

PACKAGES = ("site-packages", "dist-packages")
"""Names of folders that contain installed packages."""
MOST_MODULES, MOST_BYTES = 10_000, 4 << 20


@dataclasses.dataclass(frozen=True)
class Imported:
    """Module that a script has imported."""

    name: str
    changes: Mapping[str, Optional[str]] = dataclasses.field(default_factory=dict)
    """Environment variables that the script had changed before the import: the new value, or None if removed."""

    @property
    def line(self) -> str:
        return json.dumps([self.name, self.changes])

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


class Recorder:
    """Import finder that records each module that a script searches for.

    Python asks each finder in turn for a module. The recorder is the first finder, and never returns a module. A script
    may search for a module that does not exist. At each search, the recorder therefore checks whether the module of the
    previous search was imported. If it was not, the recorder invalidates the record of that module by a further line in
    the file. From then on, the recorder records that module only after an import.

    Modules that the file already contains are not recorded again. The file therefore does not grow at each step or each
    start. Growth is costly, because a parent process then imports the recorded modules again.
    """

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._initial_environment = dict(os.environ)
        self._last = ""
        self._changes: dict[str, Optional[str]] = {}
        records = _last_records(path)
        self._not_imported = {name for name, record in records.items() if record is None}
        """Names of modules that were searched for, but not imported.

        The file contains a line for each of these modules.
        """
        self._recorded = records.keys() - self._not_imported

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None, target: object = None) -> None:
        if os.getpid() != self._pid or len(self._recorded) >= MOST_MODULES:
            return
        self._settle()
        package = name.partition(".")[0]
        if name in self._recorded or package in getattr(sys, "stdlib_module_names", ()):
            return
        if name == package:
            self._changes = self._changed_variables()
        self._recorded.add(name)
        self._last = name
        if name not in self._not_imported:
            self._write(name, self._changes)

    def _settle(self) -> None:
        """Check whether the module of the last search was imported. If not, make its record invalid."""
        name, self._last = self._last, ""
        if not name:
            return
        if name in sys.modules:
            if name in self._not_imported:
                self._write(name, self._changes)
            return
        self._recorded.discard(name)
        if name not in self._not_imported:
            self._not_imported.add(name)
            self._write(name, None)

    def _write(self, name: str, changes: Optional[Mapping[str, Optional[str]]]) -> None:
        line = json.dumps([name, changes]).encode() + b"\n"
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, line)
            finally:
                os.close(file)

    def _changed_variables(self) -> dict[str, Optional[str]]:
        now = dict(os.environ)
        names = [*now, *(name for name in self._initial_environment if name not in now)]
        return {name: now.get(name) for name in names if now.get(name) != self._initial_environment.get(name)}


def read(path: str) -> list[Imported]:
    """Return the modules in a file, in the order of their import; empty if there is no file.

    A line that cannot be parsed is skipped. For example, it may be incomplete.
    """
    return [record for record in _last_records(path).values() if record is not None]


def lines_to_tell(path: str) -> str:
    """Return the lines of the file at `path` that another replica needs to continue the same record of imports.

    The lines include the names of modules that were searched for, but not imported.
    """
    records = _last_records(path).items()
    return "".join(f"{record.line if record else json.dumps([name, None])}\n" for name, record in records)


def _last_records(path: str) -> dict[str, Optional[Imported]]:
    """Return the last record of each module, or None for a module that was searched for, but not imported."""
    records: dict[str, Optional[Imported]] = {}
    with contextlib.suppress(OSError), open(path, "rb") as lines:
        for line in lines.read(MOST_BYTES).splitlines()[:MOST_MODULES]:
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                name, changes = json.loads(line)
                if changes is None:
                    records[name] = None
                elif (
                    records.get(name) is None
                    and _is_module(name)
                    and all(_is_variable(*change) for change in changes.items())
                ):
                    records.pop(name, None)  # the module is now after those that were imported in between
                    records[name] = Imported(name, changes)
    return records


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _is_variable(name: str, value: object) -> bool:
    """Return whether an environment variable can have this name and value.

    The value None stands for a variable that the script has removed.
    """
    can_be_value = value is None or (isinstance(value, str) and "\0" not in value)
    return can_be_value and bool(name) and not set("=\0") & set(name)
