"""Objects of v1beta1 as the API server stores them: this version and every later one reads them without a loss.

A golden file never changes. A new field gets a file of its own, or is added to a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from concertina.api import API_VERSION, crd
from concertina.api.parse import parse_stored
from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus

GOLDEN = Path(__file__).with_name("golden") / "v1beta1"
JOBS = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json")) if path.stem != "status"}
STATUS: dict[str, Any] = json.loads((GOLDEN / "status.json").read_text())


@pytest.mark.parametrize("name", JOBS)
def test_a_stored_job_is_read_without_a_loss(name: str) -> None:
    job = JOBS[name]
    assert job["apiVersion"] == API_VERSION
    spec, ignored = parse_stored(job)
    assert ignored == ()
    read = json.loads(spec.model_dump_json(by_alias=True))
    assert missing(job["spec"], {**read, "template": spec.template.manifest()}) == []


def test_a_stored_status_is_read_and_written_without_a_loss() -> None:
    assert JobStatus.model_validate(STATUS).manifest() == STATUS


def test_golden_objects_have_every_field_of_the_crd() -> None:
    spec = JobSpec.model_json_schema(by_alias=True)
    own = crd.structural(spec, spec["$defs"])  # without the fields of a pod that are Kubernetes' alone
    fields = {*paths(own, ".spec"), *paths(crd.job_schema()["properties"]["status"], ".status")}
    fields -= {".status.internal.restarts"}  # packed: tests/unit/api/test_large_status.py
    golden = {path for job in (*JOBS.values(), {"status": STATUS}) for path in values(job)}
    assert fields - golden == set()


def paths(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from paths(field.get("items", field), f"{path}.{name}")


def values(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, field in value.items():
            yield f"{path}.{name}"
            yield from values(field, f"{path}.{name}")
    elif isinstance(value, list):
        for entry in value:
            yield from values(entry, path)


def missing(stored: Any, read: Any, path: str = "spec") -> list[str]:
    """Return the paths of stored values that were read otherwise, or not at all."""
    if isinstance(stored, dict) and isinstance(read, dict):
        return [each for name in stored for each in missing(stored[name], read.get(name), f"{path}.{name}")]
    return [] if stored == read else [path]
