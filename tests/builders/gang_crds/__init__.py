"""CRDs of gang schedulers, and a check of a manifest against one of them (README.md says where they come from)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
TYPES: dict[str, type | tuple[type, ...]] = {"object": dict, "array": list, "string": str, "integer": int}


def crd(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return loaded


def problems(manifest: dict[str, Any], name: str) -> list[str]:
    """Return what the API server would refuse in a manifest, under strict validation of its fields."""
    spec = crd(name)["spec"]
    (version,) = spec["versions"]
    kind = {"apiVersion": f"{spec['group']}/{version['name']}", "kind": spec["names"]["kind"]}
    wrong = [f"{field} is not {value}" for field, value in kind.items() if manifest[field] != value]
    return wrong + _problems("spec", manifest["spec"], version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def _problems(path: str, value: Any, schema: dict[str, Any]) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path} is no quantity"]
    if not isinstance(value, TYPES[schema["type"]]) or isinstance(value, bool):
        return [f"{path} is no {schema['type']}"]
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        unknown = [f"{path}.{name} is unknown" for name in value if name not in fields and others is None]
        missing = [f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        inner = [
            problem
            for name, child in value.items()
            if (known := fields.get(name, others)) is not None
            for problem in _problems(f"{path}.{name}", child, known)
        ]
        return [*unknown, *missing, *inner]
    if isinstance(value, list):
        return [found for at, child in enumerate(value) for found in _problems(f"{path}[{at}]", child, schema["items"])]
    if isinstance(value, int):
        return [f"{path} is below {schema['minimum']}"] if value < schema.get("minimum", value) else []
    wrong = [f"{path} is none of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
    if len(value) > schema.get("maxLength", len(value)) or not re.search(schema.get("pattern", ""), value):
        wrong.append(f"{path} has another form")
    return wrong
