"""Program of a Python interpreter: its script, arguments and environment variables.

Two programs are compared to decide whether a process that has imported the modules of one can run the other. The module
has no side effects.
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
"""Prefixes of environment variables whose value at the start of a process matters.

Such a variable takes effect before a script can change it, or when a library is loaded.
"""
IGNORED = frozenset({"_", "SHLVL", "PWD", "OLDPWD", VARIABLE, *VARYING})
"""Environment variables that a shell or the agent sets for each command. No import depends on them."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Program of a Python interpreter.

    A process that has imported the modules of an equal program can run this program, too.
    """

    line: tuple[str, ...]
    """Command line, as a tuple of words."""
    words: int
    """Number of words of the command line before the arguments of the script."""
    script: str
    """Path of the script, or "" if the interpreter runs a module or code."""
    folder: str
    """Folder that Python puts at the beginning of `sys.path`."""
    directory: str
    """Working directory."""
    environment: Mapping[str, str]
    """Environment variables, without those that differ between workers."""

    @property
    def key(self) -> str:
        """Text that identifies the program, for example in a file name. It is the same in all pods of a job."""
        text = json.dumps([self.line[: self.words], self.script, self.folder])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

    def to_json(self, base: Mapping[str, str], names: Optional[Collection[str]] = None) -> str:
        """Return the program as one line of JSON, which `from_json` reads.

        Args:
            base: Environment variables that the reader of the line has too. Only differences from these variables are
                written.
            names: Names of the variables that may be written, or None for all.
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
    """Return the program in a line that `to_json` has written.

    Raises:
        ValueError: If the line does not describe a program.
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
        raise ValueError(f"not the description of a program: {error!r}") from error


def of_command(command: PythonCommand, environment: Mapping[str, str]) -> Program:
    """Return the program of a command that does nothing but run Python."""
    script = os.path.realpath(command.target) if command.runs is Runs.FILE else ""
    folder = os.path.dirname(script) if script else os.getcwd()
    words = command.options + (1 if command.runs is Runs.FILE else 2)
    return Program(command.line, words, script, folder, os.getcwd(), environment)


def reported(report: Mapping[str, Any]) -> Program:
    """Return the program of an interpreter from the description that the interpreter has sent (see `hand_over`).

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
        raise ValueError(f"not the description of an interpreter: {error!r}") from error


def difference(interpreter: Mapping[str, Any], parent: Mapping[str, Any]) -> str:
    """Return the first property in which two interpreters differ, or "" if they have the same properties."""
    return next((name for name, value in parent.items() if interpreter.get(name) != value), "")


def differing_variable(variables: Mapping[str, str], other: Mapping[str, str], read: Collection[str]) -> str:
    """Return the name of an environment variable that may affect imports and differs between two processes, or "".

    Args:
        variables: Environment variables of a worker.
        other: Environment variables of a warm parent.
        read: Names of the variables that the parent's imports have read.
    """
    names = dict.fromkeys((*variables, *other))
    differing = (name for name in names if variables.get(name) != other.get(name))
    return next((name for name in differing if is_read(name, read)), "")


def is_read(name: str, read: Collection[str]) -> bool:
    """Return whether Python or an import reads an environment variable before the script can change it.

    `read` has the names of the variables that imports have read.
    """
    return (name in read or name.startswith(BEFORE_MAIN)) and name not in IGNORED
