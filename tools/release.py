"""Computations of the release workflow: `check TAG`, `chart FOLDER` and `notes FOLDER`.

FOLDER contains files NAME.digest, which the workflow wrote. Each consists of one line REPOSITORY@sha256:HEX. This
script uses only the standard library, because the workflow runs it before anything is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "concertina"
IMAGES = {"operator": "image", "agent": "agentImage"}
"""Keys of the chart's values, by image name."""
RECORD = re.compile(r"(?P<repository>[^@\s]+)@(?P<digest>sha256:[0-9a-f]{64})\n?")


def versions() -> dict[str, str]:
    """Return the version that each file contains, by path. `appVersion` of the chart is the tag of the images."""
    parts = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/packages/*/pyproject.toml"))
    patterns = {
        **dict.fromkeys(parts, r'^version = "(.+)"$'),
        "charts/concertina/Chart.yaml": r"^version: (.+)$",
        "charts/concertina/Chart.yaml (appVersion)": r'^appVersion: "?([^"]+)"?$',
        "CHANGELOG.md": r"^## (.+?)(?: - \d{4}-\d{2}-\d{2})?$",
    }
    found = {
        name: re.search(pattern, (ROOT / name.partition(" ")[0]).read_text(), re.MULTILINE)
        for name, pattern in patterns.items()
    }
    return {name: match[1] if match else "" for name, match in found.items()}


def check(tag: str) -> None:
    """Check that a tag equals the version in each file.

    Raises:
        ValueError: When a version differs from the tag.
    """
    wrong = [f"{name} says {version!r}" for name, version in versions().items() if f"v{version}" != tag]
    if wrong:
        raise ValueError(f"the tag is {tag}, but {', '.join(wrong)}")


def records(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the repository and digest of each published artifact, by name.

    Raises:
        ValueError: When a file does not have the expected format.
    """
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("*.digest")):
        match = RECORD.fullmatch(path.read_text())
        if not match:
            raise ValueError(f"{path} is not REPOSITORY@sha256:HEX")
        found[path.stem] = (match["repository"], match["digest"])
    return found


def with_images(values: str, published: dict[str, tuple[str, str]]) -> str:
    """Return the text of values.yaml with the images of a release, by digest. Comments are preserved.

    Raises:
        ValueError: When an image has no record, or the file has an unexpected structure.
    """
    for name, value in IMAGES.items():
        if name not in published:
            raise ValueError(f"the image {name} is not recorded")
        repository, digest = published[name]
        block = re.compile(rf"(^{value}:\n(?:  .*\n)*?  repository: )\S+(\n(?:  .*\n)*?  digest: )\S+$", re.MULTILINE)
        values, replaced = block.subn(rf'\g<1>{repository}\g<2>"{digest}"', values)
        if replaced != 1:
            raise ValueError(f"values.yaml has no {value} with repository and digest")
    return values


def notes(published: dict[str, tuple[str, str]]) -> str:
    """Return the release notes: the section of the changelog, and a table of the published artifacts."""
    section = re.search(r"^## .*?\n(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    rows = [f"| {name} | `{repository}@{digest}` |" for name, (repository, digest) in published.items()]
    text = section[1].strip() if section else ""
    return "\n".join([text, "", "| published | digest |", "| --- | --- |", *rows, ""])


def main(arguments: list[str]) -> None:
    match arguments:
        case ["check", tag]:
            check(tag)
        case ["chart", folder]:
            values = CHART / "values.yaml"
            values.write_text(with_images(values.read_text(), records(Path(folder))))
        case ["notes", folder]:
            print(notes(records(Path(folder))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"release: {error}")
