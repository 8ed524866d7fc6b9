"""Parsing of a command line, to find out whether it does nothing but run Python.

A worker for such a command line can be forked from a process that has already imported the program's modules. The
module has no side effects.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Optional, Union


class Runs(enum.Enum):
    """Kind of program that a Python command line runs."""

    FILE = "file"
    MODULE = "module"
    CODE = "code"


@dataclasses.dataclass(frozen=True)
class PythonCommand:
    """Command line that does nothing but run Python: a file, a module or code."""

    line: tuple[str, ...]
    runs: Runs
    options: int
    """Number of words before the program: the interpreter, and its options."""

    @property
    def target(self) -> str:
        """Program that Python runs: the path of a file, the name of a module, or code."""
        return self.line[self.options + (self.runs is not Runs.FILE)]


@dataclasses.dataclass(frozen=True)
class Unsuited:
    """Command line for which a worker can't be forked, because it does more than run Python."""

    why: str
    """Reason why no worker can be forked, as the end of a sentence that begins with "the command starts plainly: "."""


ISOLATING = {
    "E": "ignores the environment",
    "I": "is isolated",
    "S": "does not import site",
    "i": "is interactive",
    "V": "only prints its version",
    "h": "only prints its help",
    "?": "only prints its help",
}
"""Reason why a worker can't be forked if Python has an option, keyed by the option's letter.

With some of these options, Python runs no program.
"""
ALONE = "bBdOqsuvxPR"
"""Options of Python that are one letter without a value."""
WITH_VALUE = "XW"


def parse(line: Sequence[str]) -> Union[PythonCommand, Unsuited]:
    """Return the parsed command line, or the reason why a worker can't be forked for it."""
    if not is_python(line[0]):
        return Unsuited(f"it begins with {_short(line[0])}, which is not Python")
    index = 1
    while index < len(line):
        word = line[index]
        if word == "-" or not word.startswith("-"):
            break
        if word == "--":
            index += 1
            break
        if word.startswith("--"):
            if word != "--check-hash-based-pycs":
                return Unsuited(f"Python's option {_short(word)} runs nothing")
            index += 2
            continue
        runs, takes_next_word, why = _letters(word)
        if why:
            return Unsuited(why)
        if runs is not None:
            if word[-1] not in "mc" or index + 1 >= len(line):
                return Unsuited(f"nothing to run follows {_short(word)}")
            return PythonCommand(tuple(line), runs, index)
        index += 2 if takes_next_word else 1
    if index >= len(line) or line[index] == "-":
        return Unsuited("Python reads the program from its input")
    return PythonCommand(tuple(line), Runs.FILE, index)


def _letters(word: str) -> tuple[Optional[Runs], bool, str]:
    """Parse a word of a command line that consists of one-letter options of Python, such as `-um`.

    The result has three parts: the kind of program that follows, whether the value of the last option is the next word,
    and the reason why a worker can't be forked.
    """
    for index, letter in enumerate(word[1:], 1):
        if letter in ISOLATING:
            return None, False, f"with -{letter} Python {ISOLATING[letter]}"
        if letter in WITH_VALUE:
            return None, index == len(word) - 1, ""
        if letter in "mc":
            return (Runs.MODULE if letter == "m" else Runs.CODE), False, ""
        if letter not in ALONE:
            return None, False, f"Python's option -{letter} is not supported here"
    return None, False, ""


def is_python(word: str) -> bool:
    """Return whether the first word of a command is a Python interpreter."""
    name = os.path.basename(word)
    return name.startswith("python") and all(letter.isdigit() or letter == "." for letter in name[len("python") :])


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
