"""Parts of different versions beside each other: a spec of a newer CRD, a status that an older one prunes, lines of
agents and operators that are a version apart."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from concertina.agents.bounds import bounded
from concertina.api.accounting import RoundWaits
from concertina.api.crd import job_schema
from concertina.api.internal import OLD_PLACES
from concertina.api.parse import SpecError, parse_spec, parse_stored
from concertina.api.status import JobStatus
from concertina.controller.status import dropped
from concertina.kube.parse.views import job_view
from concertina.plan.plan import plan
from concertina_protocol.codec.typed_json import ProtocolError

GOLDEN = Path(__file__).with_name("golden")
SPEC: dict[str, Any] = {
    "replicas": 2,
    "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    "trainer": {"data": {"uri": "/data"}},
    "failurePolicy": {"maxRestarts": 3},
}


def newer() -> dict[str, Any]:
    """SPEC as a newer CRD stores it."""
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


def test_of_fields_that_are_constants_now_only_what_somebody_had_set_is_named() -> None:
    """An older CRD fills in the rest, in every job."""
    spec = copy.deepcopy(SPEC)
    spec["trainer"] |= {"data": {"uri": "/data", "fetchThreads": 4, "patienceSeconds": 600}, "logEverySteps": 10}
    assert parse_stored({"spec": spec}) == (parse_spec({"spec": SPEC}), ())
    spec["trainer"]["data"]["patienceSeconds"] = 3
    assert parse_stored({"spec": spec}) == (parse_spec({"spec": SPEC}), ("spec.trainer.data.patienceSeconds",))
    with pytest.raises(SpecError, match="logEverySteps is not a field"):
        parse_spec({"spec": spec})


@pytest.mark.parametrize(
    ("policy", "hang", "straggler", "ignored"),
    [
        ({}, "Replace", "Report", ()),
        ({"hangAction": "Replace", "straggler": {"factor": 2, "action": "Report"}}, "Replace", "Report", ()),
        ({"hangAction": "Report", "straggler": {"factor": 2.0, "action": "Replace"}}, "Report", "Replace", ()),
        ({"hangAction": "Report", "straggler": {"action": "Replace"}}, "Report", "Replace", ()),
        (
            {"straggler": {"factor": 5, "action": "Replace"}},
            "Replace",
            "Replace",
            ("spec.failurePolicy.straggler",),
        ),
        (
            {"onHang": "Replace", "hangAction": "Report", "onStraggler": "Report", "straggler": {"action": "Replace"}},
            "Replace",
            "Report",
            (),
        ),
    ],
)
def test_old_spellings_of_the_answers_to_hangs_and_stragglers_are_read(
    policy: dict[str, Any], hang: str, straggler: str, ignored: tuple[str, ...]
) -> None:
    """As an older CRD stores them with its defaults, and as this one leaves them; what a person says now goes first."""
    manifest = {"spec": {**SPEC, "failurePolicy": {**SPEC["failurePolicy"], **policy}}}
    spec, found = parse_stored(manifest)
    assert (spec.failure_policy.on_hang, spec.failure_policy.on_straggler) == (hang, straggler)
    assert (found, manifest["spec"]["failurePolicy"]) == (ignored, {**SPEC["failurePolicy"], **policy})
    if "factor" not in str(policy):
        assert parse_spec(manifest) == spec


def test_the_crd_keeps_the_old_spellings_and_fills_in_neither() -> None:
    fields = job_schema()["properties"]["spec"]["properties"]["failurePolicy"]["properties"]
    for name in ("hangAction", "straggler", "onHang", "onStraggler"):
        assert "default" not in fields[name], name
    assert "action" in fields["straggler"]["properties"]


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


def test_a_status_of_an_operator_before_internal_is_read_without_a_loss_and_can_be_read_by_it() -> None:
    """Whatever the CRD prunes: an older one `internal`, and an operator that is put back knows the old places only."""
    old = json.loads((GOLDEN / "status-before.json").read_text())
    status = JobStatus.model_validate(old)
    assert (status.internal.attempts, status.internal.container_restarts) == ((0, 2, 1), (1, 0, 4))
    assert [(each.round, each.step) for each in status.internal.undone] == [(2, 40), (5, 90)]
    assert (status.internal.gang.releases, status.internal.growth.failures) == (2, 3)
    assert status.internal.round_waits == RoundWaits(round=6, checkpoint_seconds=1.25, stalled_seconds=2.5)
    written = status.manifest()
    assert _of(written, old) == old
    assert JobStatus.model_validate(written) == status
    lost = {".".join(path.split(".")[:2]) for path in dropped(written, old)}
    lacking = {"status.internal", "status.goodput", "status.incidents"}
    assert lost == lacking, "said to whoever has an older CRD"


def _of(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Of the new one, fields that the old one has."""
    return {
        name: _of(new[name], value) if isinstance(value, dict) and isinstance(new.get(name), dict) else new.get(name)
        for name, value in old.items()
    }


def test_of_a_strange_old_status_what_can_be_read_is_kept_in_its_new_place() -> None:
    old = json.loads((GOLDEN / "status-before.json").read_text())
    old["gang"]["releases"] = "often"
    metadata = {"name": "a", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = job_view({"metadata": metadata, "spec": SPEC, "status": old}).status
    assert (status.internal.gang.releases, status.internal.gang.priority) == (0, 7)
    assert (status.internal.attempts, status.world.round) == ((0, 2, 1), 6)


def test_the_crd_has_what_is_internal_in_its_old_places_too() -> None:
    status = job_schema()["properties"]["status"]
    for new, old in OLD_PLACES.items():
        found = []
        for path in (("internal", *new), old):
            field = status
            for name in path:
                field = field["properties"][name]
            found.append({key: value for key, value in field.items() if key != "description"})
        assert found[0] == found[1], old


def line(message: protocol.Message, version: int, **fields: Any) -> bytes:
    """As a side of that version would write it, with a field that is not known here."""
    frame = json.loads(protocol.encode(message))
    return json.dumps({"v": version, "kind": frame["kind"], "body": {**frame["body"], **fields}}).encode()


@pytest.mark.parametrize("apart", [-1, 0, 1])
def test_lines_of_a_side_that_is_a_version_apart_are_understood(apart: int) -> None:
    prepare = protocol.Prepare("u", 3, "c", (protocol.Candidate("r", "h:1"),))
    assert protocol.decode(line(prepare, protocol.VERSION + apart, deadline=1.5)) == prepare


def test_lines_further_apart_are_refused_with_both_versions() -> None:
    for apart in (-2, 2):
        with pytest.raises(ProtocolError, match=f"version {protocol.VERSION + apart}, this side speaks"):
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
    """Of a report, all that came after the first version."""
    body = {"replica": "r", "instance": "i", "ready": True, "round": 1, "claim": "c", "state": "running"}
    old = json.dumps({"v": protocol.VERSION - 1, "kind": "Report", "body": body}).encode()
    assert protocol.decode(old) == protocol.Report("r", "i", True, 1, "c", "running")
