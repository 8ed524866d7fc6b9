"""Check that the number of docstring violations in each package does not increase.

`make lint` runs this script. `make docstrings` records counts that have decreased. To record all counts again, delete
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
"""Requirement of each rule. DOC501 is a preview rule, so only these rules run with ruff's --preview."""
BUILT_EXCEPTION = re.compile(r"`(\w+\.)*_*[a-z]\w*` missing")
"""False positive of DOC501 for `raise refusal(...)`. Ruff assumes that such a function is an exception class."""
FOLDERS_OF_PACKAGES = ("operator", "trainer_image")
"""Folders in which each subfolder is a package with its own count."""


class Key(NamedTuple):
    rule: str
    package: str


Counts = Mapping[Key, int]


def package_of(path: PurePath) -> str:
    """Return the package to which a file belongs. `path` is relative to the repository."""
    depth = 2 if path.parts[0] in FOLDERS_OF_PACKAGES else 1
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)]) or "."


def count_violations(root: Path) -> Counts:
    """Run ruff on a repository, and return the number of violations for each rule and package.

    Raises:
        subprocess.CalledProcessError: When ruff itself fails.
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
    """Return the recorded counts."""
    packages_by_rule = json.loads(path.read_text())
    return {
        Key(rule, package): count
        for rule, packages in packages_by_rule.items()
        for package, count in packages.items()
    }  # fmt: skip


def write_counts(path: Path, counts: Counts) -> None:
    """Write the counts to a file. Packages without violations are left out."""
    packages_by_rule: dict[str, dict[str, int]] = {rule: {} for rule in RULES}
    for key in sorted(counts):
        if counts[key]:
            packages_by_rule[key.rule][key.package] = counts[key]
    path.write_text(json.dumps(packages_by_rule, indent=2) + "\n")


def rises(recorded: Counts, actual: Counts) -> Iterator[str]:
    """Yield a sentence for each count that is larger than the recorded count."""
    for key in sorted(actual):
        before = recorded.get(key, 0)
        if actual[key] > before:
            yield (
                f"{key.rule} in {key.package}: {actual[key]} docstrings lack {RULES[key.rule]}, {before} are recorded. "
                f"List them: .venv/bin/ruff check --preview --select {key.rule} {key.package}"
            )


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Compare the counts, or record them with `--write`. Return the exit status."""
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
