"""Parts of different versions beside each other.

These are a spec of a newer CRD, a status that an older CRD prunes, and lines of agents and operators that are a version
apart.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from concertina.agents.bounds import bounded
from concertina.api.parse import SpecError, parse_spec, parse_stored
from concertina.controller.status_patches import dropped
from concertina.plan.plan import plan
from concertina_protocol.codec.typed_json import ProtocolError

SPEC: dict[str, Any] = {
    "replicas": 2,
    "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    "trainer": {"data": {"uri": "/data"}},
    "failurePolicy": {"maxRestarts": 3},
}


def newer() -> dict[str, Any]:
    """Return SPEC as a newer CRD stores it."""
    spec = copy.deepcopy(SPEC)
    spec["failurePolicy"]["patience"] = "Long"
    spec["trainer"]["data"]["shuffle"] = {"seed": 7}
    spec["zones"] = ["a", "b"]
    return {"spec": spec}


def test_fields_of_a_newer_crd_are_left_out_and_named() -> None:
    spec, unknown = parse_stored(newer())
    assert spec == parse_spec({"spec": SPEC})
    assert unknown == ("spec.failurePolicy.patience", "spec.trainer.data.shuffle", "spec.zones")
    assert parse_stored({"spec": SPEC}) == (spec, ())


def test_what_is_wrong_besides_is_said() -> None:
    manifest = newer()
    manifest["spec"]["replicas"] = 0
    with pytest.raises(SpecError, match=r"spec\.replicas must be at least 1, not 0") as caught:
        parse_stored(manifest)
    assert len(caught.value.problems) == 1
    manifest = newer()
    manifest["spec"]["elastic"] = {"minReplicas": 9}
    with pytest.raises(SpecError):
        parse_stored(manifest)


def test_fields_that_are_ignored_are_told_of_once_a_generation() -> None:
    seen = jobs.observed(replace(jobs.job(jobs.spec()), ignored=("spec.zones",)))
    first = plan(seen, jobs.T0)
    (event,) = (event for event in first.events if event.reason == "UnknownFields")
    assert "spec.zones" in event.message
    again = plan(jobs.then(seen, first), jobs.T0 + 1)
    assert "UnknownFields" not in [event.reason for event in again.events]
    edited = replace(jobs.then(seen, first).job, generation=2)
    assert "UnknownFields" in [event.reason for event in plan(replace(seen, job=edited), jobs.T0 + 2).events]


@pytest.mark.parametrize(
    ("wanted", "stored", "paths"),
    [
        ({"a": 1, "b": {"c": 1.0}}, {"a": 1, "b": {"c": 1}}, ()),
        ({"a": 1, "b": {"c": 2}}, {"b": {}}, ("status.a", "status.b.c")),
        ({"list": [{"x": 1, "y": 2}]}, {"list": [{"x": 1}]}, ("status.list[].y",)),
        ({"list": []}, {"list": []}, ()),
    ],
)
def test_what_an_older_crd_prunes_is_found(wanted: Any, stored: Any, paths: tuple[str, ...]) -> None:
    assert dropped(wanted, stored) == paths


def line(message: protocol.Message, version: int, **fields: Any) -> bytes:
    """Return a line as a side of that version would write it, with a field that is unknown here."""
    frame = json.loads(protocol.encode(message))
    return json.dumps({"v": version, "kind": frame["kind"], "body": {**frame["body"], **fields}}).encode()


@pytest.mark.parametrize("apart", [-1, 0, 1])
def test_lines_of_a_side_that_is_a_version_apart_are_understood(apart: int) -> None:
    prepare = protocol.Prepare("u", 3, "c", (protocol.Candidate("r", "h:1"),))
    assert protocol.decode(line(prepare, protocol.VERSION + apart, deadline=1.5)) == prepare


def test_lines_further_apart_are_refused_with_both_versions() -> None:
    for apart in (-2, 2):
        with pytest.raises(
            ProtocolError, match=f"version {protocol.VERSION + apart} is not supported: this side has version"
        ):
            protocol.decode(line(protocol.Ping("u"), protocol.VERSION + apart))


def test_a_word_that_only_a_newer_side_knows_is_read_and_passed_on() -> None:
    report = protocol.Report("r", "i", True, 1, "c", protocol.State.RUNNING)
    newer = line(report, protocol.VERSION + 1, state="paused")
    read = bounded(protocol.decode(newer))
    assert isinstance(read, protocol.Report)
    assert read.state not in set(protocol.State)
    assert (read.state, str(read.state), f"{read.state}") == ("paused", "paused", "paused")
    assert json.loads(protocol.encode(read))["body"] == json.loads(newer)["body"]
    known = protocol.decode(protocol.encode(report))
    assert isinstance(known, protocol.Report)
    assert known.state is protocol.State.RUNNING
    assert f"{known.state}" == "running"
    with pytest.raises(ProtocolError):
        protocol.decode(line(report, protocol.VERSION, state=7))


def test_fields_that_an_older_side_does_not_send_have_defaults() -> None:
    """For a report, these are all fields that were added after the first version."""
    body = {"replica": "r", "instance": "i", "ready": True, "round": 1, "claim": "c", "state": "running"}
    old = json.dumps({"v": protocol.VERSION - 1, "kind": "Report", "body": body}).encode()
    assert protocol.decode(old) == protocol.Report("r", "i", True, 1, "c", "running")
