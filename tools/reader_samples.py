"""Draw paragraphs and docstrings at random, for a reader who has seen nothing else of the project.

`python tools/reader_samples.py SEED` prints ten paragraphs of the hand-written pages and ten docstrings of the
packages. Each sample has what a reader always sees beside it: the page and the heading, or the signature.
`notebook/prose.md` says how the answers are counted.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 10
PARAGRAPH_WORDS, DOCSTRING_WORDS = 15, 6
"""Least number of words of a sample. Shorter ones are labels."""
PACKAGES = ("operator", "trainer_image")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_NOT_PROSE = ("|", "<!--", "![", "!!!", ":::")


def paragraphs() -> Iterator[tuple[str, str]]:
    """Yield each paragraph and each list item of the hand-written pages, after its page and heading."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if "reference" in page.parts:
            continue
        heading = ""
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", _FENCE.sub("", page.read_text())):
            text = block.strip()
            if text.startswith("#"):
                heading, _, text = text.partition("\n")
            text = " ".join(text.split())
            if not text.startswith(_NOT_PROSE) and len(text.split()) >= PARAGRAPH_WORDS:
                yield f"{page.relative_to(ROOT)}, {heading.lstrip('# ')}", text


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each docstring of the packages, after its module and signature."""
    for package in PACKAGES:
        for module in sorted((ROOT / package).rglob("*.py")):
            lines = module.read_text().splitlines()
            for node in ast.walk(ast.parse("\n".join(lines))):
                if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                text = ast.get_docstring(node) or ""
                if len(text.split()) >= DOCSTRING_WORDS:
                    first, last = (0, 0) if isinstance(node, ast.Module) else (node.lineno - 1, node.body[0].lineno - 1)
                    yield f"{module.relative_to(ROOT / package)}\n" + "\n".join(lines[first:last]), text


def main() -> None:
    """Print the samples."""
    draw = random.Random(int(sys.argv[1]))
    number = 0
    for samples in (list(paragraphs()), list(docstrings())):
        for place, text in draw.sample(samples, SAMPLES):
            number += 1
            print(f"--- {number}: {place}\n\n{text}\n")


if __name__ == "__main__":
    main()
