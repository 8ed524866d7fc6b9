"""Errors of the operator for a manifest that the API server accepted."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from concertina.api.parse import MOST_SPEC_VALUES, SpecError, parse_spec, parse_stored
from concertina.api.spec import JobSpec

JOB: dict[str, Any] = {
    "spec": {
        "replicas": 3,
        "elastic": {"minReplicas": 2},
        "template": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {
                "nodeSelector": {"pool": "spot"},
                "containers": [
                    {"name": "trainer", "image": "x", "env": [{"name": "N", "valueFrom": {"fieldRef": {}}}]},
                    {"name": "sidecar", "image": "y", "command": ["z"]},
                ],
            },
        },
        "trainer": {"data": {"uri": "/data"}, "precision": "Float32"},
        "checkpoint": {"uri": "s3://bucket/run"},
    }
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return JOB with one field of its spec set; None removes it."""
    job = copy.deepcopy(JOB)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = job["spec"]
    for part in parents:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return job


def problems(job: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        parse_spec(job)
    return caught.value.problems


def test_a_good_spec_has_its_defaults_and_keeps_the_template_as_written() -> None:
    spec = parse_spec(JOB)
    assert (spec.replicas, spec.min_replicas, spec.suspend, spec.bundled) == (3, 2, False, True)
    assert (spec.workers, spec.replica_step) == (1, 1)
    assert spec.elastic is not None
    assert spec.elastic.scale_up.stabilization_window_seconds == 30
    assert spec.checkpoint is not None
    assert (spec.checkpoint.every_seconds, spec.checkpoint.keep) == (600, 5)
    assert spec.template.manifest() == JOB["spec"]["template"]


CONTAINER = "template.spec.containers.0"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("replicas", "3", 'spec.replicas must be a whole number, not "3"'),
        ("replicas", 0, "spec.replicas must be at least 1, not 0"),
        ("replicas", 1, "spec.elastic.minReplicas: elastic.minReplicas is larger than replicas"),
        ("elastic", {"standbyReplicas": -1}, "spec.elastic.standbyReplicas must be at least 0, not -1"),
        ("suspend", 1, "spec.suspend must be true or false, not 1"),
        ("sizes", [1], "spec.sizes is not a field of this version of concertina"),
        ("workersPerReplica", "two", 'spec.workersPerReplica must be Auto or a whole number from 1 to 1024, not "two"'),
        ("workersPerReplica", 0, "spec.workersPerReplica must be Auto or a whole number from 1 to 1024, not 0"),
        (
            "checkpoint",
            {"uri": "s3://a/b", "everySeconds": "often"},
            'spec.checkpoint.everySeconds must be Auto or a whole number from 1 to 31536000, not "often"',
        ),
        ("template", None, "spec.template is missing: add it"),
        ("template", 3, "spec.template must be a mapping of fields, not 3"),
        ("template.spec.containers", [], "spec.template.spec.containers has too few entries: at least 1"),
        (f"{CONTAINER}.name", "main", "spec.template.spec.containers: no container is named trainer"),
        (f"{CONTAINER}.command", ["x"], "spec.trainer: trainer configures the bundled trainer, but the container"),
        (f"{CONTAINER}.args", ["x"], "spec.trainer: trainer configures the bundled trainer, but the container"),
        (f"{CONTAINER}.env.0.value", 5, "spec.template.spec.containers[0].env[0].value must be a string (in quotes"),
        ("template.metadata.labels.team", True, "spec.template.metadata.labels.team must be a string (in quotes"),
        ("trainer", None, "spec.template.spec.containers: the container trainer has no command"),
        (
            "trainer.precision",
            "half",
            "spec.trainer.precision must be 'Auto', 'BFloat16', 'Float16', 'Float8' or",
        ),
        ("trainer.epochs", 2, "spec.trainer.epochs is not a field of this version of concertina"),
        ("trainer.model", {"dim": 24, "heads": 5}, "spec.trainer.model dim must be an even multiple"),
        (
            "parallelism",
            {"pipeline": 9},
            "spec.parallelism.pipeline: pipeline needs at least one layer of trainer.model.layers for each stage",
        ),
        (
            "warmStart",
            {"preload": ["torch"]},
            "spec.warmStart.preload: warmStart.preload applies only to your own command",
        ),
        ("warmStart", {"preload": ["a b"]}, "spec.warmStart.preload[0] "),
        ("checkpoint.uri", "ftp://host/run", "spec.checkpoint.uri: must be s3://bucket/folder, gs://"),
        ("checkpoint.initFrom", "model.bin", "spec.checkpoint.initFrom: must be s3://bucket/folder, gs://"),
        ("checkpoint.keep", 0, "spec.checkpoint.keep must be at least 1, not 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(path: str, value: Any, sentence: str) -> None:
    (problem,) = problems(changed(path, value))
    assert problem.startswith(sentence)


def test_every_problem_is_said() -> None:
    job = changed("replicas", 0)
    job["spec"]["checkpoint"]["uri"] = 5
    assert [problem.split()[0] for problem in problems(job)] == ["spec.replicas", "spec.checkpoint.uri"]


def test_a_manifest_without_a_spec() -> None:
    assert problems({}) == ("spec is missing: add the fields of the job below spec",)


@pytest.mark.parametrize(
    ("resources", "per_replica", "parallelism", "workers", "replica_step"),
    [
        ({}, "Auto", {}, 1, 1),
        ({"limits": {"nvidia.com/gpu": "8"}}, "Auto", {}, 8, 1),
        ({"limits": {"nvidia.com/gpu": 4}, "requests": {"nvidia.com/gpu": 4}}, "Auto", {"tensor": 8}, 4, 2),
        ({"limits": {"nvidia.com/gpu": 8}}, 2, {}, 2, 1),
        ({}, "Auto", {"tensor": 2, "pipeline": 3}, 1, 6),
        ({}, 4, {"tensor": 6}, 4, 3),
    ],
)
def test_workers_and_valid_sizes(
    resources: Any, per_replica: Any, parallelism: Any, workers: int, replica_step: int
) -> None:
    job = changed("trainer", None)
    job["spec"]["template"]["spec"]["containers"][0] |= {"command": ["train"], "resources": resources}
    job["spec"] |= {"workersPerReplica": per_replica, "parallelism": parallelism}
    spec = parse_spec(job)
    assert (spec.workers, spec.replica_step) == (workers, replica_step)


OURS = [
    ("template.spec.volumes", [{"name": "concertina"}]),
    ("template.spec.initContainers", [{"name": "concertina-agent"}]),
    ("template.spec.restartPolicy", "Always"),
    (f"{CONTAINER}.volumeMounts", [{"name": "v", "mountPath": "/concertina"}]),
    (f"{CONTAINER}.env", [{"name": "CONCERTINA_UID", "value": "x"}]),
    ("template.metadata.labels", {"concertina.dev/job": "x"}),
    ("checkpoint.uri", "file:///../../etc"),
    ("trainer.data.uri", "/data/../etc"),
]


@pytest.mark.parametrize(("path", "value"), OURS, ids=[path for path, _ in OURS])
def test_a_stored_job_obeys_the_same_rules_as_one_that_is_applied(path: str, value: Any) -> None:
    job = changed(path, value)
    assert len(problems(job)) == 1
    with pytest.raises(SpecError) as refused:
        parse_stored(job)
    assert refused.value.problems == problems(job)


def test_what_a_person_has_named_as_pydantic_names_alternatives_is_told_by_its_name() -> None:
    with pytest.raises(SpecError, match=r"spec\.int is not a field") as refused:
        parse_spec({"spec": {**JOB["spec"], "int": 3, "workersPerReplica": "some"}})
    assert "spec.workersPerReplica must be Auto or a whole number from 1 to 1024" in str(refused.value)
    with pytest.raises(SpecError, match=r"spec\.template\.metadata\.labels\.int must be a string"):
        parse_spec(changed("template.metadata.labels", {"int": 5}))


def test_a_spec_that_is_too_large_is_refused_in_a_sentence() -> None:
    large = copy.deepcopy(JOB)
    large["spec"]["template"]["spec"]["junk"] = ["x" * 1023] * 256
    with pytest.raises(SpecError, match=r"spec has 25[0-9] KiB as JSON, more than 256 KiB: put large values into"):
        parse_spec(large)
    options = copy.deepcopy(JOB)
    options["spec"]["trainer"] = {"model": {"entrypoint": "m:f", "options": {"a": "x" * 9000}}}
    with pytest.raises(SpecError, match=r"spec\.trainer\.model\.options has 9 KiB as JSON, more than 8 KiB"):
        parse_spec(options)


@pytest.mark.parametrize("entry", [[], {}, 0], ids=["lists", "mappings", "numbers"])
def test_a_spec_of_too_many_values_is_refused_before_it_is_checked(
    entry: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec itself is small: 20 to 30 KiB."""
    many = copy.deepcopy(JOB)
    pod = many["spec"]["template"]["spec"]
    pod["junk"] = [entry] * (MOST_SPEC_VALUES - 200)
    parse_spec(many)
    monkeypatch.setattr(JobSpec, "model_validate_json", lambda *_, **__: pytest.fail("it was checked"))
    pod["junk"] = [entry] * MOST_SPEC_VALUES
    for parse in (parse_spec, parse_stored):
        with pytest.raises(SpecError, match=r"spec has more than 10000 values .*: put large values into a ConfigMap"):
            parse(many)


def test_a_packed_template_says_what_the_template_said() -> None:
    spec = parse_spec(JOB)
    packed = spec.packed()
    assert packed.template.manifest() == spec.template.manifest()
    assert packed.template.trainer == spec.template.trainer
    assert packed.template.metadata == spec.template.metadata
    assert packed.template.spec == spec.template.spec
    assert packed.workers == spec.workers
    assert packed == parse_spec(JOB).packed()
    other = copy.deepcopy(JOB)
    other["spec"]["template"]["spec"]["hostNetwork"] = True
    assert packed != parse_spec(other).packed()
