"""agent.pyz in a Python that is too old for it: a sentence, and an exit code that the operator knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import concertina_protocol as protocol
from concertina_agent import main

PRETEND = """
import runpy, sys
sys.version_info = (3, 8, 18)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # There may be no older Python here, so this one claims to be one.


def test_a_python_that_is_too_old_is_told_so(tmp_path: Path) -> None:
    built = main.install(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PRETEND, str(built), "run"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == protocol.EXIT_OLD_PYTHON
    assert "needs Python 3.9 or newer" in done.stderr
    assert "Python 3.8.18" in done.stderr
    assert "CONCERTINA_PYTHON" in done.stderr


def test_what_tells_it_parses_in_old_pythons() -> None:
    source = Path(main.__file__).with_name(main.ENTRY).read_text()
    ast.parse(source, feature_version=(3, 0))
    assert 'f"' not in source
    assert "->" not in source.replace("# type: () -> int", "")


def test_an_installed_agent_installs_itself_again(tmp_path: Path) -> None:
    built = main.install(tmp_path)
    subprocess.run([sys.executable, str(built), "install", str(tmp_path / "copy")], check=True, timeout=60)
    assert (tmp_path / "copy" / main.PYZ).stat().st_size > 0
