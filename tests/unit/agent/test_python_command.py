"""Commands that a fork may run."""

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
    ],
)
def test_what_a_command_runs(command: list[str], runs: Runs, target: str) -> None:
    parsed = parse(command)
    assert isinstance(parsed, PythonCommand), parsed
    assert (parsed.runs, parsed.target) == (runs, target)
    assert parsed.line[parsed.options :][0] in (target, "-m", "-uc", "-c")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["accelerate", "launch", "a.py"], "it begins with accelerate, which is not Python"),
        (["./train.py"], "it begins with ./train.py, which is not Python"),
        (["pythonw", "a.py"], "it begins with pythonw, which is not Python"),
        (["python"], "Python reads the program from its input"),
        (["python", "-"], "Python reads the program from its input"),
        (["python", "-E", "a.py"], "with -E Python ignores the environment"),
        (["python", "-uI", "a.py"], "with -I Python is isolated"),
        (["python", "-S", "a.py"], "with -S Python does not import site"),
        (["python", "-i", "a.py"], "with -i Python is interactive"),
        (["python", "-V"], "with -V Python only prints its version"),
        (["python", "--version"], "Python's option --version runs nothing"),
        (["python", "-Z", "a.py"], "Python's option -Z is not supported here"),
        (["python", "-m"], "nothing to run follows -m"),
        (["bash", "-c", "python a.py"], "it begins with bash, which is not Python"),
        (["env", "python", "a.py"], "it begins with env, which is not Python"),
    ],
)
def test_a_command_that_is_more_than_python_starts_plainly(command: list[str], why: str) -> None:
    assert parse(command) == Unsuited(why)
