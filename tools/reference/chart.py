"""Reference of the chart's values, from the comments of values.yaml and the types of values.schema.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tools.reference import markdown

CHART = Path(__file__).resolve().parents[2] / "charts" / "concertina"
INTRODUCTION = """
The values of the Helm chart in `charts/concertina`, from its `values.yaml` and `values.schema.json`. Helm refuses other
values.
"""
KEY = re.compile(r"^( *)([A-Za-z][\w-]*):")


class Value(NamedTuple):
    """A key of values.yaml with the comment above it."""

    path: str
    comment: str


def page() -> str:
    """Return the page."""
    text = (CHART / "values.yaml").read_text()
    values, schema = yaml.safe_load(text), json.loads((CHART / "values.schema.json").read_text())
    return markdown.page("Chart values", INTRODUCTION, markdown.entries(_entries(text, values, schema)))


def _entries(text: str, values: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for value in keys(text):
        default = _at(values, value.path)
        node = _schema_at(schema, value.path)
        comment = " ".join(part for part in (value.comment, node.get("description", "")) if part)
        if isinstance(default, Mapping) and default:
            if comment:
                yield f"`{value.path}`", markdown.safe(comment)
        else:
            marks = [f"default `{json.dumps(default)}`"]
            marks += ["one of " + ", ".join(f"`{each}`" for each in node["enum"])] if "enum" in node else []
            yield f"`{value.path}`: {', '.join(marks)}", markdown.safe(comment)


def keys(text: str) -> Iterator[Value]:
    """Yield the keys of a YAML text whose values are plain mappings, each with the comment lines above it."""
    comment: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip().lstrip("# "))
        elif key := KEY.match(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            yield Value(".".join(path), " ".join(comment))
            comment = []
        else:
            comment = []


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def _schema_at(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    node = schema
    for name in path.split("."):
        node = _resolved(node.get("properties", {}).get(name, {}), schema)
    return node


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    target = node.get("$ref", "").removeprefix("#/definitions/")
    return {**schema["definitions"][target], **node} if target else node
