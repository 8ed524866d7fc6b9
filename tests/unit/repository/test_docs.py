"""References in the documents: links, anchors, files, modules, and the decisions that code cites."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = (*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob(".github/**/*.md")))
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))
LONGEST_LINE = 200
CODE = ("operator", "trainer_image", "monitoring", "tests", "benchmarks", "tools", "examples", "charts", "crds", "docs")

SHORT_FORMS = {
    "": (*CODE, ".github"),
    "operator/concertina": (
        "api", "model", "plan", "kube", "agents", "controller", "drill", "demo", "terminal", "cli", "local",
    ),
    "trainer_image": (
        "concertina_agent", "concertina_data", "concertina_protocol", "concertina_state", "concertina_tracking",
        "concertina_trainer", "trainingjob",
    ),
    "trainer_image/concertina_agent": ("core", "files", "net", "workers", "transfers"),
    "trainer_image/concertina_trainer": (
        "training", "state", "parallel", "model", "data", "checkpoints", "export", "format", "objects",
    ),
}  # fmt: skip
"""Prefixes of paths in documents that are repository paths, relative to the root or to this folder. A folder that is
moved or renamed stays here until no document names it."""
PACKAGES = {"concertina": "operator", "concertina_agent": "trainer_image", "concertina_data": "trainer_image",
            "concertina_protocol": "trainer_image", "concertina_state": "trainer_image",
            "concertina_trainer": "trainer_image", "trainingjob": "trainer_image"}  # fmt: skip

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@documents
def test_no_line_is_too_long(document: Path) -> None:
    lines = enumerate(_text(document).splitlines(), 1)
    assert not [f"{document}:{number} has {len(line)}" for number, line in lines if len(line) > LONGEST_LINE]


@documents
def test_links_lead_somewhere(document: Path) -> None:
    assert not [link for link in _links(document) if not _leads_somewhere(document, link)]


@documents
def test_paths_and_modules_exist(document: Path) -> None:
    named = [word for quoted in re.findall(r"`([^`]+)`", _prose(document)) for word in quoted.split()]
    shown = [word for block in re.findall(r"```.*?```", _text(document), re.DOTALL) for word in block.split()]
    missing = [word for word in named if not (_path_exists(word, document) and _module_exists(word))]
    assert not missing + [word for word in shown if word.startswith(CODE) and not _path_exists(word, document)]


def test_the_index_names_each_page_of_decisions_once() -> None:
    assert sorted(_links(ROOT / "docs/decisions.md")) == [f"decisions/{page.name}" for page in DECISIONS]


def test_no_two_decisions_have_the_same_heading() -> None:
    headings = [anchor for page in DECISIONS for anchor in _anchors(page)[1:]]
    assert sorted(set(headings)) == sorted(headings)


def test_decisions_that_code_cites_are_there() -> None:
    """A decision is cited as (decision "Reports contain all fields") in a comment or docstring."""
    names = {name for page in DECISIONS for name in re.findall(r"^## (.+)$", _text(page), re.MULTILINE)}
    sources = [path for folder in CODE for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    cited = {
        (re.sub(r"\s+#?\s*", " ", name), str(path))
        for path in sources
        for name in re.findall(r'\(decision\s[\s#]*"([^"]+)"\)', _text(path))
    }
    assert not [(name, path) for name, path in sorted(cited) if name not in names]


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", _text(path), flags=re.DOTALL)


def _links(document: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", _prose(document)) if "://" not in link]


def _leads_somewhere(document: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (document.parent / name).resolve() if name else document
    return target.exists() and (not anchor or anchor in _anchors(target))


@cache
def _anchors(document: Path) -> list[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _prose(document), re.MULTILINE)
    titles = [re.sub(r"\]\([^)]*\)|[`*\[]", "", heading).strip().lower() for heading in headings]
    return [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]


def _path_exists(word: str, document: Path) -> bool:
    """Return whether a path exists; True for text that is no path of the repository."""
    path = word.strip(".,;:()'\"")
    if not re.fullmatch(r"[\w.*/-]+", path):
        return True
    if "/" not in path:
        bare = path.endswith((".py", ".md"))
        return not bare or path in _file_names() or (document.parent / path).exists()
    first = path.split("/")[0]
    bases = [base for base, folders in SHORT_FORMS.items() if first in folders]
    return not bases or any(_found(ROOT / base, path.rstrip("/")) for base in bases)


def _found(base: Path, path: str) -> bool:
    return any(any(base.glob(name.replace("NAME", "*"))) for name in (path, path + ".py"))


@cache
def _file_names() -> frozenset[str]:
    return frozenset(path.name for folder in CODE for path in (ROOT / folder).rglob("*.*")) | {
        path.name for path in ROOT.glob("*.*")
    }


def _module_exists(word: str) -> bool:
    """Return whether a module exists; True for text that is no module of this project.

    For `package.module.name()`, the module must have the name.
    """
    parts = word.removesuffix("()").split(".")
    if parts[0] not in PACKAGES or len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return True
    place = ROOT / PACKAGES[parts[0]]
    for number, part in enumerate(parts):
        place /= part
        if not place.is_dir():
            module = place.with_suffix(".py")
            names = parts[number + 1 :] if module.exists() else parts[number:]
            source = module if module.exists() else place.parent / "__init__.py"
            return all(re.search(rf'(def|class) {name}\b|^{name}\b|"{name}"', _text(source), re.M) for name in names)
    return True
