"""Compare the docstring violations of each package with the recorded counts, which only go down.

`make lint` runs this script. `make docstrings` records counts that fell. To measure from the start again, remove
tools/docstring_counts.json and run `make docstrings`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COUNTS_FILE = Path("tools") / "docstring_counts.json"
RULES = {
    "D205": "a blank line after the first line",
    "D401": "a first line in the imperative mood",
    "DOC501": "each exception that is raised, under `Raises:`",
}
"""What each rule asks for. DOC501 is a preview rule, so ruff runs with --preview for these rules alone."""
BUILT_EXCEPTION = re.compile(r"`(\w+\.)*_*[a-z]\w*` missing")
"""DOC501 of `raise refusal(...)`: ruff takes a function that builds an exception for the exception's type."""
FOLDERS_OF_PACKAGES = ("operator", "trainer_image")
"""Folders in which each subfolder is a package with a count of its own."""


class Key(NamedTuple):
    rule: str
    package: str


Counts = Mapping[Key, int]


def package_of(path: PurePath) -> str:
    """Return the package that a file counts for; `path` is relative to the repository."""
    depth = 2 if path.parts[0] in FOLDERS_OF_PACKAGES else 1
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)]) or "."


def count_violations(root: Path) -> Counts:
    """Run ruff over a repository and count what it reports by rule and package.

    Raises:
        subprocess.CalledProcessError: ruff itself failed.
    """
    options = ["--preview", "--select", ",".join(RULES), "--output-format", "json", "--exit-zero"]
    command = [sys.executable, "-m", "ruff", "check", *options, "."]
    report = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Counter(
        Key(violation["code"], package_of(Path(violation["filename"]).relative_to(root)))
        for violation in json.loads(report)
        if not BUILT_EXCEPTION.search(violation["message"])
    )


def read_counts(path: Path) -> Counts:
    """Read the recorded counts."""
    packages_by_rule = json.loads(path.read_text())
    return {
        Key(rule, package): count
        for rule, packages in packages_by_rule.items()
        for package, count in packages.items()
    }  # fmt: skip


def write_counts(path: Path, counts: Counts) -> None:
    """Record counts. A package without violations has no entry."""
    packages_by_rule: dict[str, dict[str, int]] = {rule: {} for rule in RULES}
    for key in sorted(counts):
        if counts[key]:
            packages_by_rule[key.rule][key.package] = counts[key]
    path.write_text(json.dumps(packages_by_rule, indent=2) + "\n")


def rises(recorded: Counts, actual: Counts) -> Iterator[str]:
    """Yield a sentence for each count that is above its record."""
    for key in sorted(actual):
        before = recorded.get(key, 0)
        if actual[key] > before:
            yield (
                f"{key.rule} in {key.package}: {actual[key]} docstrings lack {RULES[key.rule]}, {before} are recorded. "
                f"List them: .venv/bin/ruff check --preview --select {key.rule} {key.package}"
            )


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Compare, or record with `--write`; return the exit status."""
    path = root / COUNTS_FILE
    actual = count_violations(root)
    write = arguments == ["--write"]
    if write and not path.exists():
        write_counts(path, actual)
    recorded = read_counts(path)
    risen = list(rises(recorded, actual))
    if risen:
        print("docstrings: counts only go down\n  " + "\n  ".join(risen), file=sys.stderr)
        return 1
    fallen = sum(recorded.values()) - sum(actual.values())
    if fallen and write:
        write_counts(path, actual)
    elif fallen:
        print(f"docstrings: {fallen} fewer violations than recorded: run `make docstrings` and commit {COUNTS_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
