"""Whether a command is Python running a file, a module or code, and nothing else: then a fork may run it. Pure."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Optional, Union


class Runs(enum.Enum):
    FILE = "file"
    MODULE = "module"
    CODE = "code"


@dataclasses.dataclass(frozen=True)
class PythonCommand:
    """A command line whose first word is a Python, and that starts no other process on its way."""

    line: tuple[str, ...]
    runs: Runs
    options: int
    """How many words of the line are the interpreter's own: its name, and options before what it runs."""
    shell: Optional[str] = None
    """The name of the shell that stood around it."""

    @property
    def target(self) -> str:
        """The file, the module's name, or the code."""
        return self.line[self.options + (self.runs is not Runs.FILE)]


@dataclasses.dataclass(frozen=True)
class Unsuited:
    why: str
    """A sentence's end, after "the command starts plainly: "."""


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
"""Options of Python with which a fork can't be prepared, or that run nothing."""
ALONE = "bBdOqsuvxPR"
"""Options of one letter that take no value."""
WITH_VALUE = "XW"
HARMLESS = ("set -e", "set -eu", "set -u", "set -euo pipefail", "set -eo pipefail", "set -o pipefail")
"""What a shell may be told before its one command: it changes nothing of that."""


def parse(command: Sequence[str]) -> Union[PythonCommand, Unsuited]:
    name = os.path.basename(command[0])
    if name in SHELLS:
        return _in_shell(name, command)
    if name == "env" and len(command) > 1 and not command[1].startswith("-") and "=" not in command[1]:
        return parse(command[1:])
    return _python(command)


def _python(line: Sequence[str], shell: Optional[str] = None) -> Union[PythonCommand, Unsuited]:
    if not _is_python(os.path.basename(line[0])):
        return Unsuited(f"it begins with {_short(line[0])}, which is no Python")
    place = 1
    while place < len(line):
        word = line[place]
        if word == "-" or not word.startswith("-"):
            break
        if word == "--":
            place += 1
            break
        if word.startswith("--"):
            if word != "--check-hash-based-pycs":
                return Unsuited(f"Python's option {_short(word)} runs nothing")
            place += 2
            continue
        runs, wants, why = _letters(word)
        if why:
            return Unsuited(why)
        if runs is not None:
            if word[-1] not in "mc" or place + 1 >= len(line):
                return Unsuited(f"{_short(word)} is not followed by what to run")
            return PythonCommand(tuple(line), runs, place, shell)
        place += 2 if wants else 1
    if place >= len(line) or line[place] == "-":
        return Unsuited("Python reads what to run from its input")
    return PythonCommand(tuple(line), Runs.FILE, place, shell)


def _letters(word: str) -> tuple[Optional[Runs], bool, str]:
    """Of one word of options: what runs after it, whether its value is the next word, and what keeps it from a fork."""
    for place, letter in enumerate(word[1:], 1):
        if letter in ISOLATING:
            return None, False, f"with -{letter} Python {ISOLATING[letter]}"
        if letter in WITH_VALUE:
            return None, place == len(word) - 1, ""
        if letter in "mc":
            return (Runs.MODULE if letter == "m" else Runs.CODE), False, ""
        if letter not in ALONE:
            return None, False, f"Python's option -{letter} is not known here"
    return None, False, ""


def _is_python(name: str) -> bool:
    return name.startswith("python") and all(letter.isdigit() or letter == "." for letter in name[len("python") :])


def _in_shell(name: str, command: Sequence[str]) -> Union[PythonCommand, Unsuited]:
    """Without `exec` bash becomes its one command, too; sh may stay and wait for it, which is not missed here."""
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
    """Text that a shell would read in its own way; which."""


def _words(text: str, arguments: tuple[str, ...]) -> Union[tuple[str, ...], Unsuited]:
    """The words of the text's one command, as the shell would give them to it."""
    try:
        commands = _commands(text, arguments)
    except _Unquoted as found:
        return Unsuited(f"the shell's text has {found}")
    while len(commands) > 1 and " ".join(commands[0]) in HARMLESS:
        commands = commands[1:]
    if len(commands) != 1:
        return Unsuited("the shell's text has more than one command" if commands else "the shell's text is empty")
    return tuple(commands[0])


def _commands(text: str, arguments: tuple[str, ...]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    place = 0
    while place < len(text):
        letter = text[place]
        if text.startswith("\\\n", place):
            place += 2
        elif letter in " \t":
            place += 1
        elif letter in ";\n":
            if letter == ";" and not commands[-1]:
                raise _Unquoted(";")
            commands.append([])
            place += 1
        elif text.startswith('"$@"', place) and text[place + 4 : place + 5] in ("", " ", "\t", "\n", ";"):
            commands[-1] += arguments
            place += 4
        else:
            word, place = _word(text, place)
            commands[-1].append(word)
    return [command for command in commands if command]


def _word(text: str, place: int) -> tuple[str, int]:
    """The word that begins there, and where it ends."""
    word = ""
    while place < len(text) and text[place] not in " \t\n;":
        letter = text[place]
        if letter in "'\"":
            end = text.find(letter, place + 1)
            quoted = text[place + 1 : end]
            if end < 0 or (letter == '"' and any(special in quoted for special in "$`\\!")):
                raise _Unquoted(_short(text[place:]))
            word, place = word + quoted, end + 1
        elif letter.isalnum() or letter in "_-./:,=+@%^" or ord(letter) > 127:
            word, place = word + letter, place + 1
        else:
            raise _Unquoted(_short(text[place:]))
    return word, place


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
