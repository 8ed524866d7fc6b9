"""Recognize commands that start a launcher such as torchrun, deepspeed or mpirun. `launcher: Agent` refuses them.

The agent starts the command once per worker. A launcher would start further processes with its own RANK and WORLD_SIZE,
so that each worker would train separately. The checks report a launcher only if the command certainly runs it (decision
"Refusal of commands that start a launcher"). The agent detects other launchers while they run.

One check is in Python and one in CEL, for the API server. The API server limits the estimated cost of a CEL rule for
the longest commands that the schema allows. The checks therefore compare words, read the text of only one word (the
third, as in `bash -c TEXT`), and look at the first container only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from concertina.api import TRAINER

REMEDY = (
    "remove the launcher from the command (python train.py). launcher: Agent starts the command once per worker, with "
    "RANK and WORLD_SIZE set. If the command is torchrun, set launcher: Torchrun"
)
PROGRAMS = ("torchrun", "deepspeed", "horovodrun", "mpirun", "mpiexec")
MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")
"""Python modules that are launchers, as in `python -m MODULE`."""
WITH_RUN = ("colossalai", "fabric")
"""Programs that are launchers if their subcommand is `run`."""
ONLY_TELLS = ("--help", "-h", "--version")
"""Arguments with which a launcher only prints information and starts nothing."""
PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 16)))
WRAPPERS = (
    *PYTHONS, "env", "nice", "ionice", "numactl", "taskset", "nohup", "time", "timeout", "stdbuf", "tini", "dumb-init",
)  # fmt: skip
"""Programs that run the words after their own options as another command."""
ACCELERATE, LAUNCH = ("accelerate",), "launch"
ACCELERATE_ALONE = ("accelerate-launch", "accelerate.commands.launch")
"""Program and module that are equivalent to `accelerate launch`.

`accelerate launch` starts its own ranks only with one of ACCELERATE_OPTIONS.
"""
ACCELERATE_OPTIONS = tuple(
    option.replace("_", dash)
    for option in ("--multi_gpu", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm")
    for dash in ("_", "-")
)
NUM_PROCESSES = ("--num_processes", "--num-processes")
"""Options with which `accelerate launch` starts several processes, unless their value is 1."""
ACCELERATE_VALUES = ("no", "bf16", "fp16")
"""Option values of `accelerate launch` that are neither numbers nor configuration files."""
DIGITS = tuple("0123456789")
SHELLS = tuple(folder + shell for shell in ("bash", "sh", "dash", "zsh") for folder in ("", "/bin/", "/usr/bin/"))
MOST_WORDS = 12
"""Number of words at the beginning of a command in which a launcher and its options are searched."""
LONGEST = 4096
"""Maximum length in characters of a shell script in a command. Longer scripts are not searched for launchers."""

GAP = r"[\s\\]+"
MODULE = rf"python[0-9.]*{GAP}(?:-[a-zA-Z]+{GAP})*-m{GAP}"
LAUNCHER = (
    rf"(?:{'|'.join(PROGRAMS)}|(?:{'|'.join(WITH_RUN)}){GAP}run|{MODULE}(?:{'|'.join(map(re.escape, MODULES))}))"
    rf"{GAP}(?:--[^hv]|--ho|-[^-hV]|[^-\s;&|#<>)])"  # an argument that is not in ONLY_TELLS
)
ACCELERATE_TEXT = (
    rf"(?:accelerate(?:-|{GAP})launch|{MODULE}accelerate\.commands\.launch){GAP}"
    rf"(?:(?:--[\w-]+(?:=\S*)?|[0-9]+|{'|'.join(ACCELERATE_VALUES)}|[^-\s]\S*\.ya?ml){GAP})*"
    rf"--(?:multi[-_]gpu|use[-_](?:fsdp|deepspeed|megatron[-_]lm)|num[-_]processes(?:=|{GAP})(?:[^1\s]|1[0-9]))"
)
QUOTED = r"""'[^']*'|"(?:[^"\\]|\\.)*\""""
COMMENT = r"#[^\n]*\n"
BEFORE = (
    # Other commands before the launcher. Stop at a redirection and at an open parenthesis: a here-document may follow.
    rf"^(?:(?:[^'\"\\#<(]|\\.|{QUOTED}|\$\([^()'\"]*\)|{COMMENT})*(?:[;&\n]|{COMMENT}))?[ \t]*"
    rf"(?:exec[ \t]+)?(?:\w+=(?:[^\s'\";&|()]|{QUOTED})*[ \t]+)*(?:[^\s'\"]*/)?"
)
CONDITIONAL = r"(?:^|[\s;&|])(?:if|case|for|while|until|select|function|test|\[\[?)\s"
"""Shell keywords. A script with one of them may run a launcher only under a condition, so it is not refused."""
FLAGS = re.ASCII | re.DOTALL
TEXTS = (BEFORE + LAUNCHER, BEFORE + ACCELERATE_TEXT)
"""Regular expressions for shell scripts that run a launcher. RE2 and Python interpret them in the same way."""


def in_words(words: Sequence[str]) -> bool:
    """Return whether a command runs a launcher: directly, through programs such as `env`, or through Python."""
    if any(word in ONLY_TELLS for word in words):
        return False
    position = next(
        (position for position, _ in enumerate(words[:MOST_WORDS]) if not _leads_on(words, position)), len(words)
    )
    return position + 1 < len(words) and _launches(words, position)


def _leads_on(words: Sequence[str], position: int) -> bool:
    """Return whether the launcher may still follow in the command after the word at `position`.

    It may follow after a wrapper such as `env`, and after a wrapper's options.
    """
    word = words[position]
    if _is_one(words[0], ("env",)) and "=" in word:
        return True
    return _is_one(word, WRAPPERS) or word.startswith("-") or _is_number(word)


def _is_number(word: str) -> bool:
    """Return whether a word is a value such as 10, 0-3 or 1h. A script such as 01_train.py is not a value."""
    return word.startswith(DIGITS) and not word.endswith(".py")


def _launches(words: Sequence[str], position: int) -> bool:
    word, following = words[position], words[position + 1]
    if _is_one(word, PROGRAMS) or word in MODULES or (_is_one(word, WITH_RUN) and following == "run"):
        return True
    accelerate = _is_one(word, ACCELERATE_ALONE) or (_is_one(word, ACCELERATE) and following == LAUNCH)
    options = range(position + 1, min(len(words), MOST_WORDS))
    return accelerate and any(
        _starts_several(words, option_position)
        and all(_is_option(words[earlier_position]) for earlier_position in range(position + 1, option_position))
        for option_position in options
    )


def _starts_several(words: Sequence[str], position: int) -> bool:
    word = words[position]
    if word in NUM_PROCESSES:
        return position + 1 < len(words) and words[position + 1] != "1"
    joined = any(word.startswith(f"{option}=") and word != f"{option}=1" for option in NUM_PROCESSES)
    return joined or word in ACCELERATE_OPTIONS


def _is_option(word: str) -> bool:
    """Return whether a word after `accelerate launch` is an option or an option's value. The script is neither."""
    is_value = _is_number(word) or word.endswith((".yaml", ".yml")) or word in (*ACCELERATE_VALUES, LAUNCH)
    return is_value or word.startswith("--")


def _is_one(word: str, names: tuple[str, ...]) -> bool:
    """Return whether a word is the name or the path of one of the programs in `names`."""
    return word in names or word.endswith(tuple(f"/{name}" for name in names))


def in_text(words: Sequence[str], expression: str) -> bool:
    """Return whether a command is a shell with a script that runs a launcher.

    Args:
        words: Words of the command.
        expression: Regular expression for a script that runs a launcher: one of TEXTS.
    """
    if len(words) < 3 or words[0] not in SHELLS or not (words[1].startswith("-") and words[1].endswith("c")):
        return False
    text = words[2]
    if len(text) > LONGEST or re.search(CONDITIONAL, text, FLAGS):
        return False
    return re.search(expression, text, FLAGS) is not None


# --- the same in CEL --------------------------------------------------------------------------------------------------

CONTAINER = "self.template.spec.containers[0]"
COMMAND, ARGS = f"{CONTAINER}.command", f"{CONTAINER}.args"
WORDS = f"({COMMAND} + (has({ARGS}) ? {ARGS} : []))"
PLACES = str(list(range(MOST_WORDS)))


def cel_in_words() -> str:
    """Return the CEL rule that corresponds to `in_words`. The rule accepts commands that run no launcher."""
    only_tells = " || ".join(
        f"has({words}) && {words}.exists(word, word in {list(ONLY_TELLS)})" for words in (COMMAND, ARGS)
    )
    following = f"{_cel_leads_on('i')} ? false : {PLACES}.all(j, j >= i || {_cel_leads_on('j')}) && {_cel_launches()}"
    return _cel_rule(
        f"!({only_tells}) && [{WORDS}].exists(words, {PLACES}.exists(i, i + 1 < size(words) && ({following})))"
    )


def _cel_leads_on(position: str) -> str:
    word = f"(size({COMMAND}) > {position} ? {COMMAND}[{position}] : {ARGS}[{position} - size({COMMAND})])"
    assigns = f"{_cel_is_one('words[0]', ('env',))} && {word}.contains('=')"
    word = f"words[{position}]"
    return f"({assigns} || {_cel_is_one(word, WRAPPERS)} || {word}.startsWith('-') || {_cel_is_number(word)})"


def _cel_is_number(word: str) -> str:
    starts = " || ".join(f"{word}.startsWith('{digit}')" for digit in DIGITS)
    return f"(({starts}) && !{word}.endsWith('.py'))"


def _cel_launches() -> str:
    word, following = "words[i]", "words[i + 1]"
    return (
        f"({_cel_is_one(word, PROGRAMS)} || {word} in {list(MODULES)} || "
        f"{_cel_is_one(word, WITH_RUN)} && {following} == 'run' || "
        f"({_cel_is_one(word, ACCELERATE_ALONE)} || {_cel_is_one(word, ACCELERATE)} && {following} == '{LAUNCH}') && "
        f"{PLACES}.exists(k, k > i && k < size(words) && {_cel_starts_several()} && "
        f"{PLACES}.all(j, j <= i || j >= k || {_cel_is_option()})))"
    )


def _cel_starts_several() -> str:
    joined = (f"words[k].startsWith('{option}=') && words[k] != '{option}=1'" for option in NUM_PROCESSES)
    apart = f"words[k] in {list(NUM_PROCESSES)} && k + 1 < size(words) && words[k + 1] != '1'"
    return f"({' || '.join((f'words[k] in {list(ACCELERATE_OPTIONS)}', *joined, apart))})"


def _cel_is_option() -> str:
    files = "words[j].endsWith('.yaml') || words[j].endsWith('.yml')"
    values = f"{_cel_is_number('words[j]')} || {files} || words[j] in {[*ACCELERATE_VALUES, LAUNCH]}"
    return f"({values} || words[j].startsWith('--'))"


def cel_in_text(expression: str) -> str:
    """Return the CEL rule that corresponds to `in_text`. The rule accepts commands that run no launcher."""
    second = f"(size({COMMAND}) > 1 ? {COMMAND}[1] : {ARGS}[1 - size({COMMAND})])"
    text = f"(size({COMMAND}) > 2 ? {COMMAND}[2] : {ARGS}[2 - size({COMMAND})])"
    return _cel_rule(
        f"size({WORDS}) > 2 && {COMMAND}[0] in {list(SHELLS)} && {second}.startsWith('-') && {second}.endsWith('c') && "
        f"size({text}) <= {LONGEST} && !{text}.matches({_cel_raw(CONDITIONAL)}) && "
        f"{text}.matches({_cel_raw(expression)})"
    )


def _cel_rule(launches: str) -> str:
    not_applicable = (
        f"self.launcher != 'Agent' || {CONTAINER}.name != '{TRAINER}' || !has({COMMAND}) || size({COMMAND}) == 0"
    )
    return f"{not_applicable} || !({launches})"


def _cel_is_one(word: str, names: tuple[str, ...]) -> str:
    return f"({word} in {list(names)} || " + " || ".join(f"{word}.endsWith('/{name}')" for name in names) + ")"


def _cel_raw(expression: str) -> str:
    """Return a regular expression as a raw CEL string in which a dot also matches a line break.

    The Python check uses the same mode (FLAGS), so that both checks accept the same commands.
    """
    escaped = expression.replace("'", r"\x27")
    return f"r'(?s){escaped}'"
