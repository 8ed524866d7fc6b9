"""The program that a command's Python runs, and the interpreters that a warm process can run."""

from typing import Any

import pytest

from concertina_agent.workers.programs import Program, guess, reported, unlike

INTERPRETER = {"executable": "/usr/bin/python", "version": "3.12", "flags": [0, 0], "sys.path": ["/usr/lib"]}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["bash", "-c", "R=a; [ -f x ] && R=b; exec python -u train.py --init=$R"], ("python", "-u", "train.py")),
        (["bash", "-c", "for i in 1 2; do python -m train $i; done"], ("python", "-m", "train")),
        (["env", "A=1", "nice", "-n", "5", "/venv/bin/python3", "a.py", "x"], ("/venv/bin/python3", "a.py")),
        (["sh", "-c", "python $SCRIPT"], None),
        (["sh", "-c", "python 'a.py"], None),
        (["./run.sh"], None),
    ],
)
def test_a_guess_is_the_first_python_of_the_words(command: list[str], line: Any) -> None:
    found = guess(command, {})
    assert (found and found.line) == line


def described(**changes: Any) -> dict[str, Any]:
    return {
        "line": ["python", "-u", "a.py", "--lr", "1"], "arguments": ["--lr", "1"], "target": "a.py", "folder": "/work",
        "environment": {"RANK": "0", "HOME": "/"}, "interpreter": INTERPRETER, **changes,
    }  # fmt: skip


def test_a_reported_program_has_no_arguments_and_no_rank() -> None:
    assert reported(described()) == Program(
        ("python", "-u", "a.py"), 2, "/work/a.py", "/work", "/work", {"HOME": "/"}, reported=True
    )
    module = described(line=["python", "-m", "a", "x"], arguments=["x"], target="-m")
    assert reported(module) == Program(("python", "-m", "a"), 1, "", "/work", "/work", {"HOME": "/"}, reported=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"line": ["python", "-u", "a.py"], "arguments": []}, ""),
        ({"line": ["python", "a.py"], "arguments": []}, "it runs python a.py, and the warm process python -u a.py"),
        ({"folder": "/other"}, "it runs /other/a.py, and the warm process /work/a.py"),
        ({"interpreter": {**INTERPRETER, "sys.path": ["/x"]}}, "its sys.path differs from the warm process's"),
        ({"interpreter": {**INTERPRETER, "version": "3.9"}}, "its version differs from the warm process's"),
        (
            {"environment": {"HOME": "/", "LD_PRELOAD": "x.so"}},
            "its variable LD_PRELOAD differs from the warm process's, and is read before a script begins",
        ),
    ],
)
def test_an_interpreter_is_taken_over_where_it_equals_the_warm_process(changes: dict[str, Any], why: str) -> None:
    assert unlike(described(**changes), reported(described()), INTERPRETER) == why
