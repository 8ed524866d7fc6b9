"""Generate the CustomResourceDefinition (CRD) from the pydantic classes.

`python -m concertina.api.crd` writes the CRD, and `--check` compares it with the files. pydantic generates JSON Schema,
but Kubernetes requires a structural schema: no references, no unions, and booleans for exclusive bounds. No library
converts one into the other (decision "A custom CRD generator").
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from concertina.api import GROUP, KIND, PLURAL, VERSION
from concertina.api.rules import RULES
from concertina.api.spec import TEMPLATE_KUBERNETES, JobSpec
from concertina.api.status import JobStatus

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILE = f"{GROUP}_{PLURAL}.yaml"
POD_TEMPLATE = ROOT / "tools" / "podtemplate" / "schema.json"
"""Schema of a pod's spec in the pinned Kubernetes version. `make pod-template` writes this file."""
KEEP = {"helm.sh/resource-policy": "keep"}
"""Annotation with which `helm uninstall` does not delete the CRD. Deletion would delete every TrainingJob."""

Schema = dict[str, Any]

COLUMNS = (
    ("Status", "string", '.status.conditions[?(@.type=="Ready")].reason', "Current state of the job."),
    ("World", "string", ".status.world.size", "Members of the current round and replicas wanted."),
    ("Step", "integer", ".status.progress.step", "Steps finished."),
    ("Progress%", "integer", ".status.progress.percent", "Share of all steps that are finished."),
    ("Loss", "number", ".status.progress.loss", "Mean loss of the last step."),
    ("Checkpoint", "date", ".status.lastCheckpoint.at", "Age of the newest durable checkpoint."),
    ("Failures", "integer", ".status.restarts.total", "Failures since the job was created."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
)
WIDE_COLUMNS = (
    ("Replicas", "integer", ".status.replicas", "Pods of the job that are not finished, without standby replicas."),
    ("Round", "integer", ".status.world.round", "Number of the current round."),
    ("Queue", "string", r".metadata.labels['kueue\.x-k8s\.io/queue-name']", "Kueue queue in which the job waits."),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', "Reason for the current state of the job."),
)
"""Columns that only `kubectl get -o wide` shows."""
SELECTABLE = (".spec.suspend", ".spec.managedBy")
"""Fields that can be used in field selectors."""

TEMPLATE_METADATA: Schema = {
    "properties": {
        "labels": {},
        "annotations": {},
        "creationTimestamp": {
            "type": "string",
            "description": "Ignored. Generated manifests have it.",
            "maxLength": 64,
            "nullable": True,
        },
    }
}
"""Metadata fields of a pod template: those of the model, and one that is accepted and ignored."""
PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
KEPT = ("type", "description", "default", "enum", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems")
SPARSE = (
    ".spec.elastic.scaleUp", ".spec.failurePolicy", ".spec.metrics", ".spec.parallelism", ".spec.scheduling",
    ".spec.stepDetection",
    ".spec.warmStart",
)  # fmt: skip
"""Sections of the spec that the API server does not fill with defaults, so that `kubectl describe` stays short."""
BOUNDS = ("minimum", "maximum", "multipleOf", "maxProperties")


def structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Convert a part of pydantic's JSON Schema into a structural schema, which Kubernetes requires."""
    node = _resolved(node, definitions)
    result: Schema = {key: node[key] for key in (*KEPT, *BOUNDS) if node.get(key) is not None}
    result |= {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}
    if node.get("x-kubernetes-int-or-string"):
        return result | {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    for bound in ("Minimum", "Maximum"):
        if (limit := node.get(f"exclusive{bound}")) is not None:
            result |= {bound.lower(): limit, f"exclusive{bound}": True}
    if "const" in node:
        result["enum"] = [node["const"]]
    if node.get("type") == "integer":
        result["format"] = "int64" if result.get("maximum", 2**31) >= 2**31 else "int32"
    if "items" in node:
        result["items"] = structural(node["items"], definitions)
        result.setdefault("x-kubernetes-list-type", "atomic")
    if node.get("type") == "object":
        result |= _object(node, definitions)
    return result


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the node with its reference resolved, and with `X or null` replaced by X.

    Keys of the node take precedence over keys of the referenced schema.

    Raises:
        TypeError: When the node is a union of several types.
    """
    choices = [choice for choice in node.get("anyOf", ()) if choice.get("type") != "null"]
    if len(choices) == 1:
        node = {**choices[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    elif choices and not node.get("x-kubernetes-int-or-string"):
        raise TypeError(f"a structural schema has no unions: {node}")
    if "$ref" not in node:
        return node
    target = definitions[node["$ref"].removeprefix("#/$defs/")]
    return _resolved({**target, **{key: value for key, value in node.items() if key != "$ref"}}, definitions)


def _object(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return the schema keys that only objects have: fields, required fields, and whether unknown fields are stored."""
    result: Schema = {}
    required = node.get("required", [])
    if properties := node.get("properties"):
        fields = {name: structural(field, definitions) for name, field in properties.items()}
        for name, field in properties.items():
            optional = any(choice.get("type") == "null" for choice in field.get("anyOf", ()))
            if name not in required and not optional and _all_defaults(fields[name]):
                fields[name]["default"] = _default_of(fields[name])
        result["properties"] = fields
    if required:
        result["required"] = sorted(required)
    additional = node.get("additionalProperties")
    if isinstance(additional, Mapping):
        result["additionalProperties"] = structural(additional, definitions)
    elif additional is True:
        # This is a part of a Kubernetes object, for which Kubernetes has its own defaults.
        return _without_defaults(result) | {PRESERVE_UNKNOWN: True}
    return result


def _all_defaults(field: Schema) -> bool:
    """Return whether all fields of an object have defaults, so that an empty object is a valid default."""
    return field.get("type") == "object" and "properties" in field and "required" not in field


def _default_of(field: Schema) -> dict[str, Any]:
    """Return the default value of an object.

    The default is an empty object, into which the API server adds the defaults of the fields. If the object has
    validation rules, the default contains the defaults of the fields itself, because the API server checks the rules
    before it adds defaults.
    """
    if "x-kubernetes-validations" not in field:
        return {}
    return {name: schema["default"] for name, schema in field["properties"].items() if "default" in schema}


def _without_defaults(schema: Schema) -> Schema:
    """Return the schema without default values, so that the API server adds none."""
    result = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in result:
        result["properties"] = {name: _without_defaults(field) for name, field in result["properties"].items()}
    if "items" in result:
        result["items"] = _without_defaults(result["items"])
    return result


def _with_defaults_described(schema: Schema) -> Schema:
    """Return the schema with each default value added to the field's description.

    `kubectl explain` shows the description of a field but not its default (decision "Field descriptions are written for
    kubectl explain").
    """
    result, default = dict(schema), schema.get("default")
    if default not in (None, "", []) and not isinstance(default, Mapping):
        result["description"] += f" Default: {json.dumps(default).strip(chr(34))}."
    if "properties" in result:
        result["properties"] = {name: _with_defaults_described(field) for name, field in result["properties"].items()}
    if "items" in result:
        result["items"] = _with_defaults_described(result["items"])
    return result


def with_fields_of(kubernetes: Schema, ours: Schema) -> Schema:
    """Return Kubernetes' schema of a type with concertina's bounds, rules and descriptions added.

    The result lists all fields, so the API server refuses or drops unknown ones.
    """
    result = kubernetes | {key: value for key, value in ours.items() if key != PRESERVE_UNKNOWN}
    if "properties" in ours:
        fields = kubernetes["properties"]
        result["properties"] = fields | {
            name: with_fields_of(fields[name], field) for name, field in ours["properties"].items()
        }
    if "items" in ours:
        result["items"] = with_fields_of(kubernetes["items"], ours["items"])
    if required := {*kubernetes.get("required", ()), *ours.get("required", ())}:
        result["required"] = sorted(required)
    return result


def job_schema() -> Schema:
    """Return the openAPIV3Schema of a TrainingJob.

    Raises:
        ValueError: When the schema of pods is for another Kubernetes version than TEMPLATE_KUBERNETES.
    """
    spec = JobSpec.model_json_schema(by_alias=True)
    status = JobStatus.model_json_schema(by_alias=True)
    schema: Schema = {
        "type": "object",
        "description": "An elastic training job.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": KIND},
            "metadata": {"type": "object"},
            "spec": _with_defaults_described(structural(spec, spec.get("$defs", {})))
            | {"description": "Desired state."},
            # A status contains what the operator observed, so the API server must not add defaults to it.
            "status": _without_defaults(structural(status, status.get("$defs", {}))),
        },
    }
    kubernetes = json.loads(POD_TEMPLATE.read_text())
    if kubernetes["kubernetes"] != TEMPLATE_KUBERNETES:
        raise ValueError(f"{POD_TEMPLATE} is of Kubernetes {kubernetes['kubernetes']}: change spec.TEMPLATE_KUBERNETES")
    # Use the complete schema: below a node that keeps unknown fields, server-side apply accepts any field and then
    # drops those of typed nodes.
    fields = schema["properties"]["spec"]["properties"]
    known = {"properties": {"metadata": TEMPLATE_METADATA, "spec": kubernetes["spec"]}}
    fields["template"] = with_fields_of(known, fields["template"])
    pod_spec = fields["template"]["properties"]["spec"]
    pod_spec["description"] += f" They are those of Kubernetes {TEMPLATE_KUBERNETES}."
    for path in SPARSE:
        del _at(schema, path)["default"]
    for rule in RULES:
        _at(schema, rule.at).setdefault("x-kubernetes-validations", []).append(rule.validation())
    return schema


def _at(schema: Schema, path: str) -> Schema:
    """Return the part of a schema that describes the field at a path such as `.spec.elastic`.

    For an empty path, the result is the whole schema.
    """
    for name in path.split(".")[1:]:
        schema = schema["properties"][name]
    return schema


def crd() -> dict[str, Any]:
    """Return the manifest of the CustomResourceDefinition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": job_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": description}
            for name, kind, path, description in COLUMNS
        ]
        + [
            {"name": name, "type": kind, "jsonPath": path, "description": description, "priority": 1}
            for name, kind, path, description in WIDE_COLUMNS
        ],
        "selectableFields": [{"jsonPath": path} for path in SELECTABLE],
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["tj"],
        "categories": ["concertina"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


class _Plain(yaml.CSafeDumper):
    """YAML dumper that writes equal values in full instead of using YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text(annotations: Mapping[str, str]) -> str:
    """Return the CustomResourceDefinition (CRD) as YAML."""
    header = "# Made by `make crds` from operator/concertina/api; not edited by hand.\n"
    definition = crd()
    if annotations:
        definition["metadata"]["annotations"] = dict(annotations)
    return header + yaml.dump(definition, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


def files() -> dict[pathlib.Path, str]:
    """Return the texts of the CRD files, keyed by path.

    One file is for kubectl, and one for the chart's template.
    """
    return {ROOT / "crds" / FILE: text({}), ROOT / "charts" / "concertina" / "crd" / FILE: text(KEEP)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the CRD to crds/ and to the chart.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    check = parser.parse_args().check
    stale = {path: content for path, content in files().items() if not path.exists() or path.read_text() != content}
    for path, content in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} differs from the models: run `make crds` and commit it", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
