"""Write the generated pages of docs/reference, or check with `--check` that they are up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tools.reference import api, chart, cli, metrics, names, reasons

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "api.md": api.page,
    "chart.md": chart.page,
    "cli.md": cli.page,
    "metrics.md": metrics.page,
    "names.md": names.page,
    "reasons.md": reasons.page,
}


def stale() -> list[str]:
    """Return the names of the pages that are out of date."""
    return [name for name, page in PAGES.items() if _content(FOLDER / name) != page()]


def _content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main(arguments: list[str]) -> int:
    """Write or check all pages, and return the exit status."""
    if "--check" in arguments:
        pages = stale()
        for name in pages:
            print(f"docs/reference/{name} is not current: run `make reference`", file=sys.stderr)
        return 1 if pages else 0
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
