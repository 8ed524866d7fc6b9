"""Hand-over of a script only between equal interpreters: each property in which they may differ."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import concertina_agent
from concertina_agent import settings
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.hand_overs import Interpreter, Plain, Start, Taken
from concertina_agent.workers.programs import reported
from concertina_agent.workers.warm_program import ScriptParent
from concertina_agent.workers.warm_start import WarmStart
from concertina_agent.workers.workers import start_command

SAYS = f"""
import json, sys
sys.path.insert(0, {str(Path(concertina_agent.__file__).parents[1])!r})
from concertina_agent.workers.hand_over import interpreter
del sys.path[0]
print(json.dumps(interpreter()))
"""
BASE = str(Path(sys.executable).resolve())
ASKED = "The warm parent is gone."
"""Reason why an interpreter runs its script itself although it equals that of the parent, which this test never
starts."""


def properties(*command: str, **environment: str) -> dict[str, Any]:
    """Return what a real interpreter tells the agent of itself."""
    said = subprocess.run([*command, "-c", SAYS], env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    return properties(BASE)


def renamed(folder: Path) -> dict[str, Any]:
    """Return the properties of this Python under another path."""
    (folder / "python").symlink_to(BASE)
    return properties(str(folder / "python"))


def in_environment(folder: Path) -> dict[str, Any]:
    """Return the properties of this Python in a virtual environment."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(BASE)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(BASE).parent}\n")
    return properties(str(folder / "bin" / "python"))


OTHERS = {
    "executable": renamed,
    "prefix": in_environment,
    "version": lambda _: {"version": f"{sys.version} of another build"},
    "flags": lambda _: properties(BASE, "-O"),
    "flags -I": lambda _: properties(BASE, "-I"),
    "flags -E": lambda _: properties(BASE, "-E"),
    "flags -S": lambda _: properties(BASE, "-S"),
    "sys.path": lambda folder: properties(BASE, PYTHONPATH=str(folder)),
}


def decided(folder: Path, parent: Mapping[str, Any], interpreter: Mapping[str, Any]) -> tuple[Plain | Taken, str]:
    """Return the agent's answer to an interpreter, and the reason for the job's status.

    The warm parent of the interpreter's program has the properties `parent`.
    """
    environment = {
        "CONCERTINA_UID": "uid", "CONCERTINA_REPLICA": "r0", "CONCERTINA_POD_IP": "127.0.0.1",
        "CONCERTINA_VOLUME": str(folder), "CONCERTINA_WARM_START": '{"enabled": true}',
    }  # fmt: skip
    command = (BASE, "script.py")
    report = {
        "line": command, "arguments": [], "target": "script.py", "directory": str(folder), "environment": {},
        "interpreter": interpreter,
    }  # fmt: skip

    async def play() -> tuple[Plain | Taken, str]:
        reaper = Reaper()
        reaper.start()
        warm = WarmStart(settings.read(environment, command), reaper)
        program = warm._add(reported(report))
        program.parent = ScriptParent(program.program, reaper, 0)
        program.parent.interpreter = parent
        process = start_command((BASE, "-S", "-c", ""), {}, reaper)
        answer = await warm._decide(Interpreter(Start(process, record=False, started_at=0.0), report, ()))
        await process.gone()
        return answer, warm.why

    return asyncio.run(play())


@pytest.mark.parametrize("case", OTHERS)
def test_an_interpreter_that_differs_in_one_property_runs_its_script_itself(
    tmp_path: Path, own: dict[str, Any], case: str
) -> None:
    name = case.partition(" ")[0]
    other = {**own, name: OTHERS[case](tmp_path)[name]}
    assert decided(tmp_path, own, other) == (Plain(), f"its {name} differs from that of the warm process")


def test_an_equal_interpreter_asks_for_a_fork(tmp_path: Path, own: dict[str, Any]) -> None:
    """Without this, the test above would pass if no interpreter were ever equal."""
    assert decided(tmp_path, own, properties(BASE)) == (Plain(), ASKED)
    assert own.keys() == {case.partition(" ")[0] for case in OTHERS}, "each property is a case above"
