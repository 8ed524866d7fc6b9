"""Programs of warm starts: the description that an interpreter sends, and the warm parents that can run its script."""

import dataclasses
from typing import Any

import pytest

from concertina_agent.workers.hand_over import VARIABLE
from concertina_agent.workers.programs import (
    Program,
    difference,
    differing_variable,
    from_json,
    of_command,
    reported,
)
from concertina_agent.workers.python_command import PythonCommand, Runs

PROGRAM = Program(("python", "-u", "a.py", "--lr", "1"), 3, "/job/a.py", "/job", "/job", {"HOME": "/"})


def described(**changes: Any) -> dict[str, Any]:
    return {
        "line": ["python", "-u", "a.py", "--lr", "1"], "arguments": ["--lr", "1"], "target": "a.py",
        "directory": "/job", "environment": {"RANK": "0", "HOME": "/", "PWD": "/", VARIABLE: "1:x"}, **changes,
    }  # fmt: skip


def test_a_described_program_has_no_rank_and_nothing_of_the_shell() -> None:
    assert reported(described()) == PROGRAM


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"line": ["python", "-u", "a.py"], "arguments": []}, True),
        ({"environment": {"HOME": "/other"}}, True),
        ({"line": ["python", "a.py"], "arguments": []}, False),
        ({"directory": "/other"}, False),
        ({"line": ["python", "-m", "a"], "arguments": [], "target": "-m"}, False),
    ],
)
def test_a_program_is_the_same_with_other_arguments_and_variables(changes: dict[str, Any], is_same: bool) -> None:
    assert (reported(described(**changes)).key == PROGRAM.key) == is_same


def test_a_command_that_is_only_python_is_the_program_that_its_interpreter_describes(tmp_path: Any) -> None:
    script = str(tmp_path / "a.py")
    line = ("python", script, "1")
    report = described(line=list(line), arguments=["1"], target=script)
    assert of_command(PythonCommand(line, Runs.FILE, 1), {}).key == reported(report).key


def test_what_is_no_description_is_refused() -> None:
    for report in ({}, described(line=None), described(environment=[])):
        with pytest.raises(ValueError, match="not the description of an interpreter"):
            reported(report)


def test_a_kept_program_has_what_differs_from_the_variables_of_all_workers() -> None:
    base = {"HOME": "/", "SET": "by the pod", "TOKEN": "secret"}
    program = dataclasses.replace(PROGRAM, environment={"HOME": "/", "TOKEN": "another", "HF_HOME": "/data"})
    assert from_json(program.to_json(base), base) == program
    other_pod = {**base, "HOME": "/other"}
    assert from_json(program.to_json(base), other_pod).environment["HOME"] == "/other"
    restored_program = from_json(program.to_json(base, {"HF_HOME"}), base)
    assert restored_program.environment == {**base, "HF_HOME": "/data"}, "what no import has read stays in its pod"


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"program": null}', '{"program": {"line": ["python"]}}'])
def test_what_is_no_program_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not the description of a program"):
        from_json(line, {})


def test_an_interpreter_differs_by_the_properties_that_the_parent_has() -> None:
    parent = {"version": "3.12", "sys.path": ["/usr/lib"]}
    assert difference({**parent, "more": 1}, parent) == ""
    assert difference({**parent, "sys.path": ["/x"]}, parent) == "sys.path"
    assert difference({}, parent) == "version"


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"HF_HOME": "/a", "LR": "2"}, ""),
        ({"HF_HOME": "/b"}, "HF_HOME"),
        ({}, "HF_HOME"),
        ({"HF_HOME": "/a", "LD_PRELOAD": "x.so"}, "LD_PRELOAD"),
        ({"HF_HOME": "/a", "RANK": "1", "PWD": "/x"}, ""),
    ],
)
def test_variables_differ_that_imports_have_read_or_that_python_reads_first(variables: Any, name: str) -> None:
    assert differing_variable(variables, {"HF_HOME": "/a"}, {"HF_HOME", "PWD"}) == name
