"""Starts of commands, plain and warm, by `programs/started.py`, and the comparison of their results."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from builders.programs import PROGRAMS, SEARCH_PATH

PRELUDE = """import os, sys
if __name__ == "__main__":
    with open(os.path.expanduser("~/warmth"), "a") as file: file.write(str(int("anchor" in sys.modules)))
    del file
import anchor
"""
"""Beginning of each script: it records whether it was started warm, and imports an installed package."""
WARMTH = "0011"
"""Records of the plain start, of the one from which modules are learned, and of two warm ones."""


def started(
    folder: Path,
    *command: str,
    preload: tuple[str, ...] = (),
    bounds: Mapping[str, int] = MappingProxyType({}),
    warmth: str | None = WARMTH,
    **environment: str,
) -> dict[str, tuple]:
    """Return the result of each way of starting the command: stdout, stderr, and exit code, or the reason for none."""
    settings = json.dumps({"preload": preload, **bounds})
    program = [sys.executable, str(PROGRAMS / "started.py"), str(folder / "volume"), settings]
    shutil.rmtree(folder / "volume", ignore_errors=True)
    (folder / "volume").mkdir()
    (folder / "warmth").write_text("")
    known = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": f"{SEARCH_PATH}:{folder / 'site-packages'}",
        **environment,
    }
    ran = subprocess.run([*program, *command], cwd=folder, env=known, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    ways: dict[str, tuple] = {}
    for (way, code, out), (_, _, err) in zip(_runs(ran.stdout), _runs(ran.stderr), strict=True):
        ways[way] = (out, err, code)
    assert warmth is None or (folder / "warmth").read_text() == warmth, ran.stderr
    return ways


def _runs(text: str) -> list[tuple[str, str, str]]:
    """Return the output without what differs from process to process, and without concertina's own log."""
    runs, lines = [], []
    for line in text.splitlines():
        if line.startswith("END "):
            _, way, code = line.split(" ", 2)
            runs.append((way, code, "\n".join(lines)))
            lines = []
        elif not line.startswith('{"t"'):
            lines.append(re.sub(r"0x[0-9a-f]+", "0x..", line))
    return runs


def alike(ways: dict[str, tuple]) -> tuple:
    assert list(ways) == ["plain", "first", "warm", "again"], ways
    for way in ("first", "warm", "again"):
        for plainly, warm in zip(ways["plain"], ways[way], strict=True):
            assert warm.split("\n") == plainly.split("\n"), way
    return ways["plain"]


def prepare(folder: Path) -> Path:
    """Fill a folder for a script with installed packages and a module beside it."""
    (folder / "beside.py").write_text("VALUE = 'beside'\n")
    (folder / "seen").write_text("")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "anchor.py").write_text("")
    (folder / "site-packages" / "reads_variables.py").write_text(
        "import os\nVALUE = os.environ.get('READ_WHEN_IMPORTED')\n"
    )
    (folder / "site-packages" / "seeds.py").write_text(
        "import numpy, torch\ntorch.manual_seed(7)\nnumpy.random.seed(7)\n"
    )
    return folder


def written(place: Path, text: str, name: str = "script.py") -> Path:
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text(PRELUDE + textwrap.dedent(text))
    return place / name
