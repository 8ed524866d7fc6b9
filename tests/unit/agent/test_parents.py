"""Parents that fork processes, and die: what the agent knows of their children, and who follows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from builders.programs import PROGRAMS, SEARCH_PATH


def seen(folder: Path, scenario: str) -> list[str]:
    """By an agent, in a process of its own: it reaps all children."""
    line = [sys.executable, str(PROGRAMS / "parents.py"), str(folder), scenario]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), SEARCH_PATH])}
    return subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def test_a_process_of_which_one_hears_with_its_parents_end_has_ended_too(tmp_path: Path) -> None:
    """Nobody else would tell its end, and who kills it would wait for ever."""
    assert seen(tmp_path, "dies having answered") == ["SIGKILL True"]
