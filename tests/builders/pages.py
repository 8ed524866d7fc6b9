"""Code blocks of the site's pages: manifests, files and commands, each with its marks."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GET_STARTED = ("install.md", "first-job.md", "elastic-ddp.md", "kill-a-node.md")
"""Pages of docs/get-started whose commands a test runs, in this order."""
WITHOUT_CLUSTER = {
    "data.md": (
        "concertina data build --out s3://bucket/data",
        "concertina data show",
        "concertina data pack",
    ),
    "dcp.md": ("concertina checkpoint export s3://bucket/run-1 FOLDER",),
    "fine-tune.md": (
        "concertina data build --chat",
        "concertina generate",
        "concertina checkpoint export",
    ),
    "own-models.md": ("PYTHONPATH=examples/audio concertina plan",),
    "planning.md": ("concertina plan",),
    "typed-data.md": (
        "concertina data build --out s3://bucket/clicks",
        "python examples/clicks/make_clicks.py",
        "python examples/embeddings/make_embeddings.py",
        "python examples/audio/make_features.py",
    ),
}
"""Beginnings of the blocks of commands that tests/train/test_site.py runs, by page."""
ON_API_SERVER = {
    "checkpoints.md": ("kubectl create secret",),
    "cli.md": ("concertina status", "concertina top", "concertina dashboard"),
    "install.md": ("kubectl apply --server-side", "kubectl patch serviceaccount", "kubectl create quota"),
    "master-key.md": ("OLD=", "kubectl -n concertina-system", "kubectl get tj"),
    "metrics.md": ("kubectl create clusterrolebinding",),
    "queued-jobs.md": ("kubectl get tj",),
    "tracing.md": ("kubectl get tj",),
}
"""The same of tests/cluster/test_site.py."""
NAMESPACED_INSTALL = ("install.md", "helm install concertina charts/concertina --namespace team-a")
"""Page and beginning of the block that tests/cluster/test_chart.py runs."""
NEEDS = ("kind", "cloud", "images", "gpu")
"""What a command may need that no test has: real kubelets, a cloud, an engine that builds images, a GPU."""
BLOCK = re.compile(
    r"(?:^ *<!-- needs: (?P<needs>[\w, ]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
SHELL = ("", "bash", "sh", "console")
PROGRAMS = (
    "concertina",
    "kubectl",
    "helm",
    "make",
    "docker",
    "python",
    "python3",
    "pip",
    "git",
    "curl",
    "torchrun",
    "aws",
)
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


def beginning_with(name: str, beginnings: str | tuple[str, ...]) -> list[Block]:
    """Return the blocks of a page that begin in one of these ways; each of these ways must have a block."""
    found = [block for block in blocks(DOCS / name) if block.text.startswith(beginnings)]
    for beginning in (beginnings,) if isinstance(beginnings, str) else beginnings:
        assert any(block.text.startswith(beginning) for block in found), f"{name} has no block {beginning}"
    return found


def commands(name: str, beginning: str, values: Mapping[str, str]) -> list[list[str]]:
    """Return the commands of the block that begins so, each as its words, with values in place of placeholders."""
    (block,) = beginning_with(name, beginning)
    return [[_with_values(word, values) for word in words] for words in block.commands if words]


def _with_values(word: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def run_by_tests() -> list[Block]:
    """Return the blocks of commands outside Get started that tests run."""
    tables: list[tuple[str, str | tuple[str, ...]]] = [
        *WITHOUT_CLUSTER.items(),
        *ON_API_SERVER.items(),
        NAMESPACED_INSTALL,
    ]
    return [block for name, beginnings in tables for block in beginning_with(name, beginnings)]


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that a later line closes
        words = line.split()
    words = words[words[:1] == ["$"] :]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words
