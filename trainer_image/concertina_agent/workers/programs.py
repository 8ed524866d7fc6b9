"""Program that the Python of a worker's command runs, and whether an interpreter equals the warm process.

The module has no side effects.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from concertina_agent.workers.environment import VARYING
from concertina_agent.workers.python_command import PythonCommand, Runs, parse

BEFORE_MAIN = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_", "GOMP_")
"""Prefixes of variables that are read before a script can change them."""
PUNCTUATION = set("();<>|&$`*?")
"""Characters of a word that only a shell can interpret."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Program of an interpreter, which a parent can run, too."""

    line: tuple[str, ...]
    """Words of the command line: the interpreter, its options, and what it runs; without the script's arguments."""
    options: int
    """Number of words before those that say what it runs."""
    script: str
    """File of the script, or empty if the script is not a file."""
    folder: str
    """Folder that Python puts at the beginning of its path."""
    directory: str
    """Working directory."""
    environment: Mapping[str, str]
    """Variables, without those that differ between workers."""
    reported: bool = False
    """Whether an interpreter of a worker has reported it; otherwise it is a guess from the command's words."""


def of_command(command: PythonCommand, environment: Mapping[str, str]) -> Program:
    """Return the program of a command that is only Python."""
    script = os.path.realpath(command.target) if command.runs is Runs.FILE else ""
    folder = os.path.dirname(script) if script else os.getcwd()
    return Program(command.line, command.options, script, folder, os.getcwd(), environment)


def guess(command: Sequence[str], environment: Mapping[str, str]) -> Optional[Program]:
    """Return the program of the first Python among a command's words and those of its shell text, if there is one."""
    for words in (tuple(command), *_texts(command)):
        for index in range(len(words)):
            found = parse(words[index:])
            if isinstance(found, PythonCommand):
                line = found.line[: found.options + (1 if found.runs is Runs.FILE else 2)]
                if not any(PUNCTUATION & set(word) for word in line if found.runs is not Runs.CODE):
                    return of_command(dataclasses.replace(found, line=line), environment)
    return None


def _texts(command: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for text in command:
        if any(letter.isspace() for letter in text):
            words = shlex.shlex(text, posix=True, punctuation_chars=True)
            words.whitespace_split = True
            try:
                yield tuple(words)
            except ValueError:
                continue


def reported(report: Mapping[str, Any]) -> Program:
    """Return the program of an interpreter that has described itself."""
    line, arguments, target = report["line"], report["arguments"], report["target"]
    head = tuple(line[: len(line) - len(arguments)])
    is_file = target not in ("", "-", "-c", "-m")
    script = os.path.realpath(os.path.join(report["folder"], target)) if is_file else ""
    environment = {name: value for name, value in report["environment"].items() if name not in VARYING}
    options = max(1, len(head) - (1 if target not in ("-c", "-m") else 2))
    folder = os.path.dirname(script) if script else report["folder"]
    return Program(head, options, script, folder, report["folder"], environment, reported=True)


def unlike(report: Mapping[str, Any], program: Program, interpreter: Mapping[str, Any]) -> str:
    """Return the reason why an interpreter cannot be run by a parent, or an empty string if it can.

    Args:
        report: The interpreter's description.
        program: Program of the parent.
        interpreter: Properties of the parent's own interpreter.
    """
    found = reported(report)
    if found.line != program.line:
        return f"it runs {_short(found.line)}, and the warm process {_short(program.line)}"
    if found.script != program.script:
        return f"it runs {found.script}, and the warm process {program.script}"
    for name, value in interpreter.items():
        if report["interpreter"].get(name) != value:
            return f"its {name} differs from the warm process's"
    name = differing_variable(found.environment, program.environment)
    return f"its variable {name} differs from the warm process's, and is read before a script begins" if name else ""


def differing_variable(variables: Mapping[str, str], other_variables: Mapping[str, str]) -> str:
    """Return the name of a variable that differs and is read before a script can change it, or an empty string."""
    names = [name for name in (*variables, *other_variables) if name.startswith(BEFORE_MAIN)]
    return next((name for name in names if variables.get(name) != other_variables.get(name)), "")


def _short(line: Sequence[str]) -> str:
    text = shlex.join(line)
    return text if len(text) <= 80 else f"{text[:80]}..."
