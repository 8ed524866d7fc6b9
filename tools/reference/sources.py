"""String constants in the source files. The reference pages are compared with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("operator", "trainer_image")
TEMPLATES = ROOT / "charts" / "concertina" / "templates"


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules, by path."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def constants(pattern: str) -> set[str]:
    """Return the string constants in the code and the words in the chart's templates that fully match a pattern."""
    return {text for text in _texts() if re.fullmatch(pattern, text)}


def _texts() -> Iterator[str]:
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for path in sorted(path for path in TEMPLATES.rglob("*") if path.is_file()):
        yield from re.findall(r"[\w./-]+", path.read_text())
