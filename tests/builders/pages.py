"""Code blocks of the site's pages: manifests, files and commands, each with its marks."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GET_STARTED = ("install.md", "first-job.md", "elastic-ddp.md", "kill-a-node.md")
"""Pages of docs/get-started whose commands a test runs, in this order."""
NEEDS = ("kind", "cloud", "release")
"""What a command may need that no test has: real kubelets, a real cluster with its services, a published release."""
BLOCK = re.compile(
    r"(?:^ *<!-- needs: (?P<needs>[\w, ]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
SHELL = ("", "bash", "sh", "console")
PROGRAMS = ("concertina", "kubectl", "helm", "make", "docker", "python", "pip", "git", "curl", "torchrun")
"""Programs by whose name a block without a language is recognised as commands."""


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    page: Path
    language: str
    title: str
    needs: str
    text: str

    @property
    def name(self) -> str:
        return str(self.page.relative_to(DOCS))

    @property
    def manifests(self) -> list[dict[str, Any]]:
        """The YAML documents of the block."""
        if self.language != "yaml":
            return []
        return [document for document in yaml.safe_load_all(self.text) if isinstance(document, dict)]

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a block of commands, each as its words."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [_words(line) for line in lines]
        return words if any(each and Path(each[0]).name in PROGRAMS for each in words) else []


def blocks(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    for match in BLOCK.finditer(page.read_text()):
        text = textwrap.dedent(match["text"])
        yield Block(page, match["language"], match["title"] or "", match["needs"] or "", text)


def all_blocks() -> list[Block]:
    """Return the code blocks of all pages; decisions have none, and the generated pages are tested as such."""
    pages = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "reference"]
    return [block for page in pages for block in blocks(page)]


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that a later line closes
        words = line.split()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words
