"""Reference page of the TrainingJob, generated from the CustomResourceDefinition."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tools.reference import markdown

from concertina.api import API_VERSION, KIND, crd

INTRODUCTION = f"""
The fields of a `{KIND}` of `{API_VERSION}`, from the CustomResourceDefinition in `crds/`. `kubectl explain tj.spec`
shows the same texts. A field is optional unless it is marked as required.
"""
FOREIGN = ("template",)
"""Fields whose subfields are documented by Kubernetes."""
INTERNAL = ("internal",)
"""Fields for internal use by the operator."""
Schema = Mapping[str, Any]


def page() -> str:
    """Return the text of the page."""
    version = crd.crd()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    columns = ((f"`{c['name']}`", markdown.safe(c["description"])) for c in version["additionalPrinterColumns"])
    sections = (section for name in ("spec", "status") for section in _sections(schema[name], name))
    printed = f"## Columns of `kubectl get tj`\n\n{markdown.entries(columns)}"
    return markdown.page("API", INTRODUCTION, *sections, printed)


def _sections(schema: Schema, path: str) -> Iterator[str]:
    """Yield the section of an object and the sections of all objects inside it."""
    rules = dict.fromkeys(rule["message"] for rule in schema.get("x-kubernetes-validations", ()) if "message" in rule)
    parts = [f"## {path}", markdown.paragraph(markdown.safe(schema.get("description", "")))]
    if rules:
        parts.append("Rules:\n\n" + markdown.entries((markdown.safe(rule), "") for rule in rules))
    required = schema.get("required", ())
    fields = schema["properties"]
    parts.append(markdown.entries(_field(name, field, name in required) for name, field in fields.items()))
    yield "\n\n".join(part for part in parts if part)
    for name, field in fields.items():
        if name not in (*FOREIGN, *INTERNAL):
            yield from _below(field, f"{path}.{name}")


def _below(field: Schema, path: str) -> Iterator[str]:
    if field.get("properties"):
        yield from _sections(field, path)
    elif "items" in field:
        yield from _below(field["items"], f"{path}[]")
    elif isinstance(field.get("additionalProperties"), Mapping):
        yield from _below(field["additionalProperties"], f"{path}.*")


def _field(name: str, field: Schema, required: bool) -> tuple[str, str]:
    marks = [f"*{_type(field)}*"] + (["**required**"] if required else [])
    if "enum" in field:
        marks.append("one of " + ", ".join(markdown.code(str(value)) for value in field["enum"] if value is not None))
    if "default" in field and not isinstance(field["default"], Mapping):
        marks.append(f"default {markdown.code(json.dumps(field['default']))}")
    marks += [
        f"{word} {markdown.code(str(field[key]))}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"))
        if key in field
    ]
    return f"`{name}`: {', '.join(marks)}", _described(field)


def _described(field: Schema) -> str:
    """Return the description without its default, because the type line already shows the default."""
    text = str(field.get("description", ""))
    default = field.get("default")
    if default not in (None, "", []) and not isinstance(default, Mapping):
        text = text.removesuffix(f" Default: {json.dumps(default).strip(chr(34))}.")
    return markdown.safe(text)


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if isinstance(field.get("additionalProperties"), Mapping):
        return f"map of {_type(field['additionalProperties'])}"
    return str(field.get("type", "any"))
