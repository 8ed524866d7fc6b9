"""MkDocs hooks that add files outside docs to the site if pages in docs link to them.

A Markdown file outside docs, such as CONTRIBUTING.md or a page of notebook, becomes a page below `repository/`. Other
files are copied there. README.md is the home page. A link to a folder becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS, OUTSIDE = "docs", "repository"
HOME = {"README.md": "index.md"}
"""Files of the repository that are already on the site, with the page that contains each of them."""
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs to which pages link, including links in the added files."""
    pending = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(pending)
    for source in pending:
        for target in _targets(source):
            if target not in seen and not target.startswith(f"{DOCS}/") and target not in HOME:
                seen.add(target)
                files.append(_file(target, config))
                if target.endswith(".md"):
                    pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adjust links between docs and files outside docs."""
    here = page.file.src_uri
    source = here.removeprefix(f"{OUTSIDE}/") if here.startswith(f"{OUTSIDE}/") else f"{DOCS}/{here}"
    parts = BLOCK.split(markdown)
    parts[::2] = [LINK.sub(lambda link: _changed(link, source, here), text) for text in parts[::2]]
    return "".join(parts)


def _changed(link: re.Match[str], source: str, here: str) -> str:
    text, address = link.groups()
    name, _, anchor = address.partition("#")
    if "://" in address or not name:
        return link[0]
    target = _resolved(source, name)
    if (ROOT / target).is_dir():
        return text
    address = posixpath.relpath(HOME.get(target) or _site_uri(target), posixpath.dirname(here) or ".")
    return f"[{text}]({address}#{anchor})" if anchor else f"[{text}]({address})"


def _site_uri(target: str) -> str:
    return target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else f"{OUTSIDE}/{target}"


def _file(target: str, config: MkDocsConfig) -> File:
    file = File.generated(config, f"{OUTSIDE}/{target}", abs_src_path=str(ROOT / target))
    file.inclusion = InclusionLevel.NOT_IN_NAV
    return file


def _targets(source: str) -> Iterator[str]:
    """Yield the files of the repository to which a page links."""
    for link in LINK.finditer(BLOCK.sub("", (ROOT / source).read_text())):
        name = link[2].partition("#")[0]
        if name and "://" not in link[2] and (ROOT / (target := _resolved(source, name))).is_file():
            yield target


def _resolved(source: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
