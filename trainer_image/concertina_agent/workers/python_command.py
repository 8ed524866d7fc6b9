"""Check whether a command is only Python running a file, a module or code, so that a fork may run it.

The module has no side effects.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Optional, Union


class Runs(enum.Enum):
    """Kind of program that Python runs."""

    FILE = "file"
    MODULE = "module"
    CODE = "code"


@dataclasses.dataclass(frozen=True)
class PythonCommand:
    """Command line whose first word is a Python, and that starts no other process on its way."""

    line: tuple[str, ...]
    runs: Runs
    options: int
    """Number of the line's words that are the interpreter's own: its name, and the options before the program."""
    shell: Optional[str] = None
    """Name of the shell that surrounds the command, or None."""

    @property
    def target(self) -> str:
        """File, name of the module, or code."""
        return self.line[self.options + (self.runs is not Runs.FILE)]


@dataclasses.dataclass(frozen=True)
class Unsuited:
    """Command that a fork cannot run."""

    why: str
    """Reason, as the end of a sentence after "the command starts plainly: "."""


SHELLS = ("sh", "bash", "dash", "ash")
ISOLATING = {
    "E": "ignores the environment",
    "I": "is isolated",
    "S": "does not import site",
    "i": "is interactive",
    "V": "only prints its version",
    "h": "only prints its help",
    "?": "only prints its help",
}
"""Options of Python with which a fork cannot be prepared, or that run nothing."""
ALONE = "bBdOqsuvxPR"
"""Options of one letter that take no value."""
WITH_VALUE = "XW"
HARMLESS = ("set -e", "set -eu", "set -u", "set -euo pipefail", "set -eo pipefail", "set -o pipefail")
"""Commands that a shell may run before its one command, because they do not change that command."""


def parse(command: Sequence[str]) -> Union[PythonCommand, Unsuited]:
    """Return the parsed command, or the reason why a fork cannot run it."""
    name = os.path.basename(command[0])
    if name in SHELLS:
        return _in_shell(name, command)
    if name == "env" and len(command) > 1 and not command[1].startswith("-") and "=" not in command[1]:
        return parse(command[1:])
    return _python(command)


def _python(line: Sequence[str], shell: Optional[str] = None) -> Union[PythonCommand, Unsuited]:
    if not _is_python(os.path.basename(line[0])):
        return Unsuited(f"it begins with {_short(line[0])}, which is no Python")
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
                return Unsuited(f"{_short(word)} is not followed by what to run")
            return PythonCommand(tuple(line), runs, index, shell)
        index += 2 if takes_next_word else 1
    if index >= len(line) or line[index] == "-":
        return Unsuited("Python reads what to run from its input")
    return PythonCommand(tuple(line), Runs.FILE, index, shell)


def _letters(word: str) -> tuple[Optional[Runs], bool, str]:
    """Return the result of one word of options.

    The result is the kind of program that follows, whether the option's value is the next word, and why a fork is
    impossible.
    """
    for index, letter in enumerate(word[1:], 1):
        if letter in ISOLATING:
            return None, False, f"with -{letter} Python {ISOLATING[letter]}"
        if letter in WITH_VALUE:
            return None, index == len(word) - 1, ""
        if letter in "mc":
            return (Runs.MODULE if letter == "m" else Runs.CODE), False, ""
        if letter not in ALONE:
            return None, False, f"Python's option -{letter} is not known here"
    return None, False, ""


def _is_python(name: str) -> bool:
    return name.startswith("python") and all(letter.isdigit() or letter == "." for letter in name[len("python") :])


def _in_shell(name: str, command: Sequence[str]) -> Union[PythonCommand, Unsuited]:
    """Parse a command that a shell runs.

    Without `exec`, bash replaces itself by its one command, too. sh may stay and wait for the command, which makes no
    difference here.
    """
    if len(command) < 3 or not command[1].startswith("-") or not command[1].endswith("c"):
        return Unsuited(f"{name} runs something else than one command after -c")
    if set(command[1][1:-1]) - set("eu"):
        return Unsuited(f"{name} has the option {_short(command[1])}, which does more than run a command")
    words = _words(command[2], tuple(command[4:]))
    if isinstance(words, Unsuited):
        return words
    if words[0] == "exec":
        words = words[1:]
    if not words:
        return Unsuited("the shell's text has no command")
    if "=" in words[0]:
        return Unsuited("the shell's text sets a variable")
    return _python(words, name)


class _Unquoted(ValueError):
    """Error for text that only a shell can interpret; its message is that text."""


def _words(text: str, arguments: tuple[str, ...]) -> Union[tuple[str, ...], Unsuited]:
    """Return the words of the text's one command, as the shell would pass them to it."""
    try:
        commands = _commands(text, arguments)
    except _Unquoted as construct:
        return Unsuited(f"the shell's text has {construct}")
    while len(commands) > 1 and " ".join(commands[0]) in HARMLESS:
        commands = commands[1:]
    if len(commands) != 1:
        return Unsuited("the shell's text has more than one command" if commands else "the shell's text is empty")
    return tuple(commands[0])


def _commands(text: str, arguments: tuple[str, ...]) -> list[list[str]]:
    """Return the words of each command in the text.

    Raises:
        _Unquoted: If only a shell can interpret the text.
    """
    commands: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        letter = text[position]
        if text.startswith("\\\n", position):
            position += 2
        elif letter in " \t":
            position += 1
        elif letter in ";\n":
            if letter == ";" and not commands[-1]:
                raise _Unquoted(";")
            commands.append([])
            position += 1
        elif text.startswith('"$@"', position) and text[position + 4 : position + 5] in ("", " ", "\t", "\n", ";"):
            commands[-1] += arguments
            position += 4
        else:
            word, position = _word(text, position)
            commands[-1].append(word)
    return [command for command in commands if command]


def _word(text: str, position: int) -> tuple[str, int]:
    """Return the word that begins at a position, and the position of its end.

    Raises:
        _Unquoted: If only a shell can interpret the word.
    """
    word = ""
    while position < len(text) and text[position] not in " \t\n;":
        letter = text[position]
        if letter in "'\"":
            end = text.find(letter, position + 1)
            quoted = text[position + 1 : end]
            if end < 0 or (letter == '"' and any(special in quoted for special in "$`\\!")):
                raise _Unquoted(_short(text[position:]))
            word, position = word + quoted, end + 1
        elif letter.isalnum() or letter in "_-./:,=+@%^" or ord(letter) > 127:
            word, position = word + letter, position + 1
        else:
            raise _Unquoted(_short(text[position:]))
    return word, position


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
