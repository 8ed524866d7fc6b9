"""Generate the chart's README from the comments in its values.yaml.

`make chart-readme` writes the file. `--check` fails if the file is out of date. The comment above a value is its
description.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "concertina"
README = CHART / "README.md"
WIDTH = 160
SHORT = 60
"""Maximum length in characters of a default that is shown. Readers can find longer defaults in values.yaml."""
INTRODUCTION = """\
<!-- Made by `make chart-readme` from values.yaml; not edited by hand. -->
# Chart of the concertina operator

concertina runs elastic training jobs on Kubernetes {kubernetes}. This chart installs its operator.

```
helm install concertina charts/concertina --namespace concertina-system --create-namespace
helm test concertina --namespace concertina-system --logs
```

[Installing concertina](../../docs/install.md) explains namespaces, permissions, images, upgrades and how to uninstall.

## Values

`values.schema.json` refuses values that are unknown or of another type.

"""


class Value(NamedTuple):
    """Key in values.yaml."""

    name: str
    """Path of the key, such as `image.tag`."""
    default: Any
    description: str
    """Comment above the key. Empty without a comment."""


def keys(text: str) -> Iterator[Value]:
    """Yield all keys of a values.yaml in order. An object comes before the keys inside it."""
    yield from _below(text.splitlines(), yaml.compose(text, Loader=yaml.SafeLoader), ())


def values(text: str) -> Iterator[Value]:
    """Yield the keys that a user sets: scalars, lists, empty objects, and objects that have a comment.

    Raises:
        ValueError: When a value has no description.
    """
    whole = ""
    for value in keys(text):
        is_group = isinstance(value.default, dict) and value.default
        if (whole and value.name.startswith(f"{whole}.")) or (is_group and not value.description):
            continue
        if not value.description:
            raise ValueError(f"{value.name} has no comment in values.yaml")
        whole = value.name
        yield value


def _below(lines: list[str], node: yaml.MappingNode, path: tuple[str, ...]) -> Iterator[Value]:
    for key, child in node.value:
        name = (*path, key.value)
        description = " ".join(_comment_above(lines, key.start_mark.line))
        yield Value(".".join(name), yaml.safe_load(yaml.serialize(child)), description)
        if isinstance(child, yaml.MappingNode):
            yield from _below(lines, child, name)


def _comment_above(lines: list[str], line: int) -> list[str]:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return comment


def readme() -> str:
    """Return the text of the README."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    kubernetes = re.sub(r">=(\d+\.\d+).*", r"\1 or newer", chart["kubeVersion"])
    items = [_item(value) for value in values((CHART / "values.yaml").read_text())]
    return INTRODUCTION.format(kubernetes=kubernetes) + "\n".join(items) + "\n"


def _item(value: Value) -> str:
    default = json.dumps(value.default)
    shown = f"`{default}`" if len(default) <= SHORT else "as in values.yaml"
    text = re.sub(r"\(docs/([\w-]+)\.md(#[\w-]+)?\)", r"([\1](../../docs/\1.md\2))", value.description)
    text = re.sub(r"(?<![/\[])docs/([\w-]+)\.md(#[\w-]+)", r"[\1](../../docs/\1.md\2)", text)
    return textwrap.fill(
        f"- `{value.name}` ({shown}): {text}",
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the chart's README.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file differs")
    check, text = parser.parse_args().check, readme()
    if README.exists() and README.read_text() == text:
        return 0
    if check:
        print(f"{README.relative_to(ROOT)} differs from values.yaml: run `make chart-readme` and commit it")
        return 1
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
