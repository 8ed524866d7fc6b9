"""Write the schema of a PodTemplateSpec in the pinned Kubernetes version: `make pod-template`.

The API server of a local cluster publishes the schema as OpenAPI. This script converts the schema to a structural
schema: it resolves references, and removes what a CustomResourceDefinition may not contain. It also removes the
metadata, because the CRD defines its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concertina.local import cluster
from concertina.local.state.record import Options

FILE = Path(__file__).with_name("schema.json")
POD_SPEC = "io.k8s.api.core.v1.PodSpec"
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
QUANTITY_PATTERN = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
"""Pattern of the API server, as controller-gen writes it into CRDs."""
EITHER = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
KEPT = (
    "type", "format", "enum", "required", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)  # fmt: skip
REMOVED = {POD_SPEC: ("ephemeralContainers",)}
"""Fields that a pod template may not have."""

Schema = dict[str, Any]


def structural(schemas: Mapping[str, Any], node: Mapping[str, Any]) -> Schema:
    """Convert a node of the API server's OpenAPI document to a structural schema."""
    name, node = _resolved(schemas, node)
    result: Schema = {"description": first_sentence(text)} if (text := node.get("description")) else {}
    if name == QUANTITY:
        return result | EITHER | {"pattern": QUANTITY_PATTERN}
    if name == INT_OR_STRING:
        return result | EITHER
    result |= {key: node[key] for key in KEPT if key in node}
    if properties := node.get("properties"):
        removed = REMOVED.get(name, ())
        result["properties"] = {
            field: structural(schemas, value) for field, value in properties.items() if field not in removed
        }
    if isinstance(others := node.get("additionalProperties"), Mapping):
        result["additionalProperties"] = structural(schemas, others)
    if "items" in node:
        result["items"] = structural(schemas, node["items"])
        _set_defaults_of_keys(result, _resolved(schemas, node["items"])[1])
    return result


def _resolved(schemas: Mapping[str, Any], node: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the type name of a node and its schema without references. The name is empty for an unnamed type."""
    name = ""
    for choice in (node, *node.get("allOf", ())):
        if "$ref" in choice:
            name = choice["$ref"].rpartition("/")[2]
            node = {**schemas[name], **{key: value for key, value in node.items() if key not in ("allOf", "$ref")}}
    return name, node


def _set_defaults_of_keys(array: Schema, items: Mapping[str, Any]) -> None:
    """Copy the defaults of a list's map keys, because such a key must be required or have a default."""
    for key in array.get("x-kubernetes-list-map-keys", ()):
        if key not in array["items"].get("required", ()):
            array["items"]["properties"][key]["default"] = items["properties"][key]["default"]


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z)\"'])\.\s", text.replace("\n", " "), maxsplit=1)[0].rstrip(". ") + "."


def published() -> tuple[str, Schema]:
    """Return the version of the pinned API server, and the schemas that it publishes for core types."""
    with cluster.owned(f"pod-template-{os.getpid()}", Options(nodes=0)) as local:
        version = json.loads(local.kubectl("version", "-o", "json"))["serverVersion"]
        document = json.loads(local.kubectl("get", "--raw", "/openapi/v3/api/v1"))
    return f"{version['major']}.{version['minor']}", document["components"]["schemas"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    version, schemas = published()
    text = (
        json.dumps(
            {"kubernetes": version, "spec": structural(schemas, {"$ref": f"#/components/schemas/{POD_SPEC}"})}, indent=1
        )
        + "\n"
    )
    if options.check and FILE.read_text() != text:
        print(f"{FILE.name} is not that of Kubernetes {version}: run `make pod-template`", file=sys.stderr)
        return 1
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
