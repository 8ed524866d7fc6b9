"""CRD that is made from the models: it follows Kubernetes' rules (tests/cluster checks that Kubernetes accepts it)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from concertina.api import crd
from concertina.api.internal import Internal
from concertina.api.restarts import Restart, Restarts
from concertina.api.rules import RULES
from concertina.api.spec import JobSpec
from concertina.api.status import Condition, JobStatus, rfc3339, unix_seconds
from concertina.api.world import Claim, World
from concertina_trainer.config.model_sizes import ModelSize


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from nodes(schema["items"], f"{path}[]")


ALL = dict(nodes(crd.job_schema()))
SPEC = {path: node for path, node in ALL.items() if path.startswith(".spec")}
FIELDS = ALL[".spec"]["properties"]
_MODEL = JobSpec.model_json_schema(by_alias=True)
OWN = {path for path, _ in nodes(crd.structural(_MODEL, _MODEL["$defs"]), ".spec")}
"""Fields of the spec that Kubernetes does not define alone."""


def test_every_field_is_described() -> None:
    bare = [path for path, node in ALL.items() if not node.get("description") and not path.endswith("[]")]
    assert [path for path in bare if path not in ("", ".metadata")] == []


def explained(schema: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield fields and descriptions as `kubectl explain --recursive` shows them, without those of a pod."""
    for name, field in schema.get("properties", {}).items():
        choices = f" ({', '.join(field['enum'])})" if "enum" in field else ""
        yield f"{indent}{name}{choices}: {field['description']}"
        if name != "template":
            yield from explained(field.get("items", field), indent + "  ")


def test_kubectl_explain_reads_as_a_page() -> None:
    lines = list(explained(crd.job_schema()["properties"]["spec"]))
    assert len(lines) > 60
    assert [line for line in lines if not line.endswith(".") or "  " in line.strip() or len(line) > 320] == []
    assert [line for line in lines if line.count(".") > 12 or ".." in line] == []
    ours = re.compile(r"\b(claims?|rungs?|ladder|round|leads?|bearing|borne|durable state)\b")
    assert [line for line in lines if ours.search(line)] == [], "words that only we have"
    assert "  maxRestarts: " + FIELDS["failurePolicy"]["properties"]["maxRestarts"]["description"] in lines
    assert FIELDS["checkpoint"]["properties"]["keep"]["description"].endswith(" Default: 5.")
    assert list(FIELDS)[:4] == ["replicas", "elastic", "template", "workersPerReplica"], "what one begins with"


def test_each_enumerated_value_of_the_spec_is_a_camel_case_identifier() -> None:
    values = {value for path in OWN for value in SPEC[path].get("enum", ())} - set(ModelSize)
    assert {value for value in values if not re.fullmatch("[A-Z][A-Za-z0-9]*", value)} == set()
    assert "None" not in {
        value for path in OWN for value in SPEC[path].get("enum", ()) if path != ".spec.cleanPodPolicy"
    }


def test_every_list_says_how_it_is_merged() -> None:
    lists = {path: node for path, node in ALL.items() if node.get("type") == "array"}
    assert [path for path, node in lists.items() if "x-kubernetes-list-type" not in node] == []
    containers = ".spec.template.spec.containers"
    assert lists[f"{containers}[].env"]["x-kubernetes-list-map-keys"] == ["name"]
    assert lists[f"{containers}[].args"]["x-kubernetes-list-type"] == "atomic"


def test_every_list_and_string_of_the_spec_is_bounded() -> None:
    loose = [
        path
        for path, node in SPEC.items()
        if path in OWN
        if (node.get("type") == "array" and "maxItems" not in node)
        or (node.get("type") == "string" and "maxLength" not in node and "enum" not in node)
        or (node.get("type") in ("integer", "number") and not {"minimum", "maximum"} <= node.keys())
    ]
    assert loose == []


def test_each_number_is_the_same_in_all_that_reads_json() -> None:
    """One of Helm and kubectl writes large integers as floats, so they would conflict over the CRD."""
    keywords = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")
    assert [path for path, node in ALL.items() if any(abs(node.get(each, 0)) > 2**53 for each in keywords)] == []


def test_no_keyword_that_a_structural_schema_forbids() -> None:
    for path, node in ALL.items():
        assert not node.keys() & {"$ref", "oneOf", "allOf", "title", "const", "prefixItems", "examples"}, path
        assert "anyOf" not in node or node["x-kubernetes-int-or-string"], path
        assert isinstance(node.get("exclusiveMinimum", True), bool), path


def test_the_status_and_the_template_are_never_filled_in() -> None:
    filled = [path for path, node in ALL.items() if "default" in node]
    keys = ("containers[].ports[].protocol", "initContainers[].ports[].protocol", "imagePullSecrets[].name")
    assert {path for path in filled if path.startswith((".status", ".spec.template"))} == {
        f".spec.template.spec.{key}" for key in keys
    }, "keys of lists, which must have a value"
    assert ".spec.replicas" in filled, "scale and HPA need it present"
    sparse = ("failurePolicy", "metrics", "parallelism", "elastic.scaleUp", "stepDetection", "warmStart")
    assert [name for name in sparse if f".spec.{name}" in filled] == []


def test_columns_and_rules_name_fields_that_exist() -> None:
    columns = [*crd.COLUMNS, *crd.WIDE_COLUMNS]
    paths = [column[2] for column in columns if column[2].startswith(".status") and "?" not in column[2]]
    assert [path for path in (*paths, *crd.SELECTABLE) if path not in ALL] == []
    assert [rule for rule in RULES if rule.at + (rule.field or "") not in ALL] == []


def test_a_default_has_what_the_rules_of_its_object_ask_for() -> None:
    """The API server refuses such a CRD, because it evaluates the rules before it fills in the fields of a default."""
    assert ALL[".spec.trainer.memory"]["default"] == {}
    assert {"dim": 128, "heads": 4}.items() <= ALL[".spec.trainer.model"]["default"].items()


def test_bounds_that_exclude_and_references_and_nulls() -> None:
    class Inner(BaseModel):
        share: float = 0.5

    class Outer(BaseModel):
        inner: Inner | None = None
        count: int | None = None

    schema = Outer.model_json_schema()
    schema["properties"]["count"]["anyOf"][0]["exclusiveMinimum"] = 0
    made = crd.structural(schema, schema["$defs"])["properties"]
    assert made["count"] == {"type": "integer", "format": "int64", "minimum": 0, "exclusiveMinimum": True}
    assert made["inner"]["properties"]["share"] == {"type": "number", "default": 0.5}
    assert "default" not in made["inner"]


def test_a_union_is_an_error() -> None:
    class Either(BaseModel):
        value: int | str

    with pytest.raises(TypeError, match="no unions"):
        crd.structural(Either.model_json_schema(), {})


def test_the_files_are_up_to_date() -> None:
    assert [path for path, text in crd.files().items() if path.read_text() != text] == []


def test_status_survives_a_newer_operator_and_a_round_trip() -> None:
    restart = Restart(at=rfc3339(10.5), replica="a-0-1", reason="WorkerFailed")
    status = JobStatus(internal=Internal(attempts=(0, 2)), restarts=Restarts(total=1, recent=(restart,)))
    manifest = status.manifest()
    assert manifest["restarts"]["recent"][0]["at"] == "1970-01-01T00:00:10.500000Z"
    assert "progress" not in manifest
    assert JobStatus.model_validate(manifest | {"invented": 1}) == status
    assert unix_seconds(restart.at) == 10.5


def test_a_status_leaves_out_what_is_empty_and_is_read_as_it_was() -> None:
    waiting = Condition(type="Ready", status="False", reason="Waiting", last_transition_time=rfc3339(0))
    status = JobStatus(conditions=(waiting,), rounds=1, world=World(claim=Claim(round=1, claim_id="c")))
    assert status.manifest() == {
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Waiting",
                "message": "",
                "lastTransitionTime": rfc3339(0),
            }
        ],
        "world": {"claim": {"round": 1, "claimId": "c"}},
        "rounds": 1,
        "restarts": {"total": 0},
    }
    assert JobStatus.model_validate(status.manifest()) == status
