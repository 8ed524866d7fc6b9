"""Death of parents that fork processes: the ends of their children, and their successors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from builders.programs import PROGRAMS, SEARCH_PATH


def seen(folder: Path, scenario: str) -> list[str]:
    """Return what an agent observes. It runs in a process of its own, because it reaps all children."""
    line = [sys.executable, str(PROGRAMS / "parents.py"), str(folder), scenario]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), SEARCH_PATH])}
    return subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, timeout=20).stdout.splitlines()


def test_a_process_of_which_one_hears_with_its_parents_end_has_ended_too(tmp_path: Path) -> None:
    """Nothing else would report the child's end, and a caller that kills it would wait forever."""
    assert seen(tmp_path, "dies having answered") == ["SIGKILL True"]


def test_one_that_dies_as_it_imports_is_followed_where_the_first_was_warm(tmp_path: Path) -> None:
    """The parent dies for lack of memory, for example, like its predecessor."""
    assert seen(tmp_path, "once") == ["Warm(error='')", "exit code 7"]


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("for good", "The process that imports little.preload died: see its output."),
        ("can't start", "The command '/nowhere/python3' can't be started: No such file or directory."),
    ],
)
def test_where_none_can_follow_an_agent_is_not_ready_any_more(tmp_path: Path, scenario: str, why: str) -> None:
    assert seen(tmp_path, scenario) == ["Warm(error='')", why, f"Warm(error={why!r})"]
