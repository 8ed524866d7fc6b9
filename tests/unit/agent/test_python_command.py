"""Which commands a fork may run."""

import pytest

from concertina_agent.workers.python_command import PythonCommand, Runs, Unsuited, parse


@pytest.mark.parametrize(
    ("command", "runs", "target"),
    [
        (["python", "train.py", "--lr", "1"], Runs.FILE, "train.py"),
        (["/opt/conda/bin/python3.11", "-u", "train.py"], Runs.FILE, "train.py"),
        (["python3", "-X", "dev", "-Wignore", "-OOsB", "--", "train.py"], Runs.FILE, "train.py"),
        (["python", "-m", "package.train", "-c"], Runs.MODULE, "package.train"),
        (["python", "-uc", "print(1)", "-m"], Runs.CODE, "print(1)"),
        (["python", "--check-hash-based-pycs", "never", "train.py"], Runs.FILE, "train.py"),
        (["env", "python", "train.py"], Runs.FILE, "train.py"),
        (["bash", "-c", "python train.py"], Runs.FILE, "train.py"),
        (["/bin/sh", "-ec", "set -euo pipefail; exec python -m train --name 'a b' \"c d\""], Runs.MODULE, "train"),
    ],
)
def test_what_a_command_runs(command: list[str], runs: Runs, target: str) -> None:
    parsed = parse(command)
    assert isinstance(parsed, PythonCommand), parsed
    assert (parsed.runs, parsed.target) == (runs, target)
    assert parsed.line[parsed.options :][0] in (target, "-m", "-uc", "-c")


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        ('exec python a.py "$@"', ["bash", "1", "2 3"], ["python", "a.py", "1", "2 3"]),
        ('python a.py "$@" end', ["bash"], ["python", "a.py", "end"]),
        ("set -e\n\nexec python a.py \\\n  --lr 1\n", [], ["python", "a.py", "--lr", "1"]),
        ("python a.py --x='$HOME *' --y=\"it's\" a''b", [], ["python", "a.py", "--x=$HOME *", "--y=it's", "ab"]),
    ],
)
def test_a_shells_words_are_those_that_it_would_give(text: str, arguments: list[str], line: list[str]) -> None:
    parsed = parse(["bash", "-c", text, *arguments])
    assert isinstance(parsed, PythonCommand), parsed
    assert (list(parsed.line), parsed.shell) == (line, "bash")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["accelerate", "launch", "a.py"], "it begins with accelerate, which is no Python"),
        (["./train.py"], "it begins with ./train.py, which is no Python"),
        (["pythonw", "a.py"], "it begins with pythonw, which is no Python"),
        (["python"], "Python reads what to run from its input"),
        (["python", "-"], "Python reads what to run from its input"),
        (["python", "-E", "a.py"], "with -E Python ignores the environment"),
        (["python", "-uI", "a.py"], "with -I Python is isolated"),
        (["python", "-S", "a.py"], "with -S Python does not import site"),
        (["python", "-i", "a.py"], "with -i Python is interactive"),
        (["python", "-V"], "with -V Python only prints its version"),
        (["python", "--version"], "Python's option --version runs nothing"),
        (["python", "-Z", "a.py"], "Python's option -Z is not known here"),
        (["python", "-m"], "-m is not followed by what to run"),
        (["bash", "train.sh"], "bash runs something else than one command after -c"),
        (["bash", "-lc", "python a.py"], "bash has the option -lc, which does more than run a command"),
        (["bash", "-c", "cd /x && python a.py"], "the shell's text has && python a.py"),
        (["bash", "-c", "python a.py; rm b"], "the shell's text has more than one command"),
        (["bash", "-c", "python a.py &"], "the shell's text has &"),
        (["bash", "-c", "python a.py > log"], "the shell's text has > log"),
        (["bash", "-c", "python a.py $LR"], "the shell's text has $LR"),
        (["bash", "-c", 'python a.py "$LR"'], 'the shell\'s text has "$LR"'),
        (["bash", "-c", 'python a.py "$@"x'], 'the shell\'s text has "$@"x'),
        (["bash", "-c", "python *.py"], "the shell's text has *.py"),
        (["bash", "-c", "python ~/a.py"], "the shell's text has ~/a.py"),
        (["bash", "-c", "python a.py # 1"], "the shell's text has # 1"),
        (["bash", "-c", "A=1 python a.py"], "the shell's text sets a variable"),
        (["bash", "-c", "python 'a.py"], "the shell's text has 'a.py"),
        (["bash", "-c", "exec"], "the shell's text has no command"),
        (["bash", "-c", " "], "the shell's text is empty"),
        (["bash", "-c", "bash -c 'python a.py'"], "it begins with bash, which is no Python"),
        (["env", "-i", "python", "a.py"], "it begins with env, which is no Python"),
        (["env", "A=1", "python", "a.py"], "it begins with env, which is no Python"),
    ],
)
def test_a_command_that_is_more_than_python_starts_plainly(command: list[str], why: str) -> None:
    assert parse(command) == Unsuited(why)
