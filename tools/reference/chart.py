"""Reference page of the chart's values, generated from values.yaml and values.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tools.chart_readme import CHART, keys
from tools.reference import markdown

INTRODUCTION = """
The values of the Helm chart in `charts/concertina`, from its `values.yaml` and `values.schema.json`. Helm refuses other
values.
"""


def page() -> str:
    """Return the text of the page."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    return markdown.page("Chart values", INTRODUCTION, markdown.entries(_entries(schema)))


def _entries(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for value in keys((CHART / "values.yaml").read_text()):
        node = _schema_at(schema, value.name)
        comment = " ".join(part for part in (value.description, node.get("description", "")) if part)
        if isinstance(value.default, Mapping) and value.default:
            if comment:
                yield f"`{value.name}`", markdown.safe(comment)
        else:
            marks = [f"default `{json.dumps(value.default)}`"]
            marks += ["one of " + ", ".join(f"`{word}`" for word in node["enum"])] if "enum" in node else []
            yield f"`{value.name}`: {', '.join(marks)}", markdown.safe(comment)


def _schema_at(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    node = schema
    for name in path.split("."):
        node = _resolved(node.get("properties", {}).get(name, {}), schema)
    return node


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    target = node.get("$ref", "").removeprefix("#/definitions/")
    return {**schema["definitions"][target], **node} if target else node
