"""Hash of a pod's template: it stays the same as long as the user's fields do."""

from __future__ import annotations

from typing import Any

import pytest

from builders.manifests import job, made
from concertina.api.rules import RULES
from concertina.api.spec import JobSpec
from concertina.kube.manifests.pod import BUNDLED_INTO_PODS, INTO_PODS
from concertina.kube.parse.views import job_view, pod_view
from concertina.kube.resources import Raw

TEMPLATE: Raw = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}
SPEC: Raw = {"replicas": 2, "template": TEMPLATE, "checkpoint": {"uri": "s3://bucket/x"}}


def template_hash(spec: Raw) -> str:
    view = job_view(job(spec))
    assert view.spec is not None, view.spec_error
    return view.template_hash


def changed(spec: Raw = SPEC, **container: Any) -> Raw:
    trainer = {**spec["template"]["spec"]["containers"][0], **container}
    return {**spec, "template": {"spec": {**spec["template"]["spec"], "containers": [trainer]}}}


@pytest.mark.parametrize(
    "other",
    [
        changed(image="other"),
        changed(args=["--lr", "1"]),
        changed(resources={"limits": {"nvidia.com/gpu": 1}}),
        {**SPEC, "template": {**TEMPLATE, "metadata": {"labels": {"team": "a"}}}},
        {**SPEC, "checkpoint": {"uri": "s3://bucket/y"}},
        {**SPEC, "checkpoint": None},
        {**SPEC, "workersPerReplica": 2},
        {**SPEC, "launcher": "Torchrun"},
    ],
)
def test_what_goes_into_pods_makes_another_hash(other: Raw) -> None:
    assert template_hash(other) != template_hash(SPEC)


@pytest.mark.parametrize(
    "other",
    [
        {**SPEC, "replicas": 3, "elastic": {"minReplicas": 1}},
        {**SPEC, "suspend": True},
        {**SPEC, "failurePolicy": {"maxRestarts": 3}, "activeDeadlineSeconds": 9},
        {**SPEC, "parallelism": {"tensor": 2}},
        {**SPEC, "launcher": "Agent", "workersPerReplica": "Auto"},
        changed(env=[]),
    ],
    ids=str,
)
def test_what_does_not_go_into_pods_and_what_is_as_it_is_unsaid_makes_the_same(other: Raw) -> None:
    assert template_hash(other) == template_hash(SPEC) != ""


@pytest.mark.parametrize("trainer", [None, {"steps": 10, "data": {"uri": "/data"}}])
def test_defaults_that_an_api_server_fills_in_make_no_difference(trainer: Raw | None) -> None:
    """A newer CRD has more defaults, and fills them into stored objects as they are read."""
    spec = SPEC if trainer is None else {**changed(command=[]), "trainer": trainer}
    view = job_view(job(spec))
    assert view.spec is not None
    filled = view.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert len(str(filled)) > 2 * len(str(spec))
    assert template_hash(filled) == view.template_hash


def test_the_pod_says_it() -> None:
    pod = made(job(SPEC))
    assert pod["metadata"]["annotations"]["concertina.dev/template-hash"] == template_hash(SPEC)
    metadata = {**pod["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "namespace": "n"}
    assert pod_view({**pod, "metadata": metadata}).view.template_hash == template_hash(SPEC)


def test_what_this_version_does_not_know_is_nothing_to_judge_by() -> None:
    newer = {**SPEC, "checkpoint": {**SPEC["checkpoint"], "fieldOfTomorrow": 1}}
    assert job_view(job(newer)).ignored
    assert template_hash(newer) == ""
    assert "concertina.dev/template-hash" not in made(job(newer))["metadata"]["annotations"]


def test_parallelism_goes_into_pods_of_the_bundled_trainer_alone() -> None:
    """Scripts do not get the parallelism, so a change of it must not restart them."""
    bundled = {**changed(command=[]), "trainer": {"steps": 10, "data": {"uri": "/data"}}}
    assert template_hash({**bundled, "parallelism": {"tensor": 2}}) != template_hash(bundled)
    assert template_hash({**bundled, "parallelism": {"tensor": 1}}) == template_hash(bundled)


def test_what_changes_only_while_suspended_is_hashed() -> None:
    held = {(rule.field or "").lstrip(".") for rule in RULES if "oldSelf.suspend" in rule.cel}
    aliases = {JobSpec.model_fields[name].alias for name in INTO_PODS | BUNDLED_INTO_PODS}
    assert aliases == held
