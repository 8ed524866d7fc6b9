"""Python 3.9, the oldest Python of scripts in a job."""

from __future__ import annotations

import os
from pathlib import Path

OLDEST_VARIABLE = "CONCERTINA_PYTHON_3_9"
"""Environment variable with the path of a Python 3.9. If it is set, as in CI, no test skips this Python."""
WITHOUT = f"there is no Python 3.9: install one by pyenv, or set {OLDEST_VARIABLE} to its path"


def oldest() -> str | None:
    """Return the path of a Python 3.9: the one that the variable names, or an installed one. None if there is none."""
    if named := os.environ.get(OLDEST_VARIABLE):
        return named
    found = [*Path("/usr/bin").glob("python3.9"), *Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9")]
    return next(map(str, found), None)
