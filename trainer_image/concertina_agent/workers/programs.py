"""Program of a Python interpreter (its script, arguments and variables), and whether a warm parent can run it instead.

The module has no side effects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any, Optional

from concertina_agent.workers.environment import VARYING
from concertina_agent.workers.hand_over import VARIABLE
from concertina_agent.workers.python_command import PythonCommand, Runs

BEFORE_MAIN = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "TORCH")
"""Prefixes of variables that are read before a script can change them, or by libraries as they are loaded."""
IGNORED = frozenset({"_", "SHLVL", "PWD", "OLDPWD", VARIABLE, *VARYING})
"""Variables that a shell or the agent sets for each command, and that no import of a parent depends on."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Program of an interpreter. A warm parent of the same program can run it too."""

    line: tuple[str, ...]
    """Words of the command line."""
    words: int
    """Number of words without the script's arguments."""
    script: str
    """File of the script, or empty if the script is not a file."""
    folder: str
    """Folder that Python puts at the beginning of its path."""
    directory: str
    """Working directory."""
    environment: Mapping[str, str]
    """Variables, without those that differ between workers."""

    @property
    def key(self) -> str:
        """Name of the program, which is the same in all pods of a job."""
        text = json.dumps([self.line[: self.words], self.script, self.folder])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

    def to_json(self, base: Mapping[str, str], names: Optional[Collection[str]] = None) -> str:
        """Return the program as one line.

        Args:
            base: Variables of which only the differences are written.
            names: Variables that may be written, or None for all.
        """
        variables = {**dict.fromkeys(base), **self.environment}
        changes = {
            name: value
            for name, value in variables.items()
            if value != base.get(name) and (names is None or is_read(name, names))
        }
        fields = {**dataclasses.asdict(self), "environment": changes}
        return json.dumps({"program": fields})


def from_json(line: str, base: Mapping[str, str]) -> Program:
    """Return the program of a line.

    Raises:
        ValueError: If it is no such line.
    """
    try:
        fields = json.loads(line)["program"]
        changes: Mapping[str, Optional[str]] = fields["environment"]
        variables = {**base, **changes}
        environment = {str(name): str(value) for name, value in variables.items() if value is not None}
        command, words = tuple(map(str, fields["line"])), int(fields["words"])
        script, folder, directory = (str(fields[name]) for name in ("script", "folder", "directory"))
        return Program(command, words, script, folder, directory, environment)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no program: {error!r}") from error


def of_command(command: PythonCommand, environment: Mapping[str, str]) -> Program:
    """Return the program of a command that is only Python."""
    script = os.path.realpath(command.target) if command.runs is Runs.FILE else ""
    folder = os.path.dirname(script) if script else os.getcwd()
    words = command.options + (1 if command.runs is Runs.FILE else 2)
    return Program(command.line, words, script, folder, os.getcwd(), environment)


def reported(report: Mapping[str, Any]) -> Program:
    """Return the program of an interpreter that has described itself (`hand_over`).

    Raises:
        ValueError: If the description is not complete.
    """
    try:
        line, target, directory = tuple(report["line"]), report["target"], report["directory"]
        is_file = target not in ("", "-", "-c", "-m")
        script = os.path.realpath(os.path.join(directory, target)) if is_file else ""
        environment = {name: value for name, value in report["environment"].items() if name not in IGNORED}
        folder = os.path.dirname(script) if script else directory
        return Program(line, len(line) - len(report["arguments"]), script, folder, directory, environment)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no description of an interpreter: {error!r}") from error


def difference(interpreter: Mapping[str, Any], parent: Mapping[str, Any]) -> str:
    """Return the first property in which an interpreter differs from a parent's, or an empty string."""
    return next((name for name, value in parent.items() if interpreter.get(name) != value), "")


def differing_variable(variables: Mapping[str, str], other: Mapping[str, str], read: Collection[str]) -> str:
    """Return the name of a variable that differs and matters to imports, or an empty string.

    Args:
        variables: Variables of a worker.
        other: Variables of a parent.
        read: Variables that the parent's imports have read.
    """
    names = dict.fromkeys((*variables, *other))
    differing = (name for name in names if variables.get(name) != other.get(name))
    return next((name for name in differing if is_read(name, read)), "")


def is_read(name: str, read: Collection[str]) -> bool:
    """Return whether a variable matters before a script can change it."""
    return (name in read or name.startswith(BEFORE_MAIN)) and name not in IGNORED
