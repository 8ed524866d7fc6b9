"""Arbitrary input from the API server, a proxy, an older CRD, or a person's file.

The operator and its command read the input, or refuse it with a sentence.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import jobs
from builders.mutated import Reader, all_of, plays
from concertina.api import API_VERSION, KIND
from concertina.api.parse import SpecError, parse_spec, parse_stored
from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus
from concertina.cli.jobs import read_manifest
from concertina.controller import settings
from concertina.kube import access, deep_json
from concertina.kube.errors import ApiError, Forbidden, from_status
from concertina.kube.execute import outcome
from concertina.kube.parse import notice_taints, refusals, room
from concertina.kube.parse.views import job_view
from concertina.plan.observed import JobObservation, JobView, Refusal
from concertina.plan.plan import plan
from concertina.terminal.cluster_connection import UserError

HERE = "tests/unit/kube/test_strange_bytes.py"
FOLDER = Path(tempfile.mkdtemp(prefix="concertina-fuzz-"))
METADATA = {
    "name": "demo",
    "namespace": "default",
    "uid": jobs.UID,
    "generation": 1,
    "creationTimestamp": "2027-01-15T08:00:00Z",
    "annotations": {"concertina.dev/checkpoint": "now"},
}
CONTAINER = {"name": "trainer", "image": "x", "env": [{"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}
SPECS: tuple[dict[str, Any], ...] = (
    {
        "replicas": 3,
        "elastic": {"minReplicas": 2},
        "workersPerReplica": "Auto",
        "template": {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [CONTAINER]}},
        "trainer": {"data": {"uri": "/data"}, "precision": "Float32"},
        "checkpoint": {"uri": "s3://bucket/run", "everySeconds": "Auto"},
        "failurePolicy": {"onHang": "Replace", "onStraggler": "Replace"},
    },
    {"replicas": 2, "template": {"spec": {"containers": [{**CONTAINER, "command": ["python3", "-c", "pass"]}]}}},
)
TRAINS = jobs.running(jobs.spec())
STATUS = json.dumps(TRAINS.job.status.manifest()).encode()
REFUSED = {
    "kind": "Status",
    "status": "Failure",
    "message": 'pods "a" is forbidden: exceeded quota: q, requested: pods=1,cpu=2, used: pods=3, limited: pods=4,cpu=9',
    "reason": "Forbidden",
    "details": {"name": "a", "kind": "pods", "causes": [{"reason": "NamespaceTerminating", "message": "it ends"}]},
    "code": 403,
}  # fmt: skip
SAYS = (
    b"0/5 nodes are available: 2 Insufficient cpu, 3 node(s) had untolerated taint {a: b}. preemption: 0/5 nodes are "
    b"available: 5 Preemption is not helpful for scheduling.",
    REFUSED["message"].encode(),
)  # fmt: skip
EXECUTED = {"kind": "Status", "status": "Failure", "message": "command terminated with exit code 1"}
JOB = {"apiVersion": API_VERSION, "kind": KIND, "metadata": METADATA, "spec": SPECS[0]}
KUBECONFIG = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "n"}}],
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1", "insecure-skip-tls-verify": True}}],
    "users": [{"name": "c", "user": {"token": "t"}}],
}  # fmt: skip
ENVIRONMENT = {
    "CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i",
    "CONCERTINA_HEALTH": "0.0.0.0:8080", "CONCERTINA_NOTICE_TAINTS": "a,b=c",
    "CONCERTINA_FAULT_CONDITIONS": "A,B=False",
    "CONCERTINA_WATCH_NAMESPACES": "a b",
}  # fmt: skip


def text(content: bytes) -> str:
    return content.decode(errors="replace")


def spec(content: bytes) -> JobSpec:
    parsed: Any = json.loads(content)
    return parse_stored({"spec": parsed})[0]


def written(content: bytes) -> JobSpec:
    return parse_spec({"spec": json.loads(content)})


def as_kopf_reads(content: bytes) -> Any:
    return json.loads(deep_json.cut(content))


def viewed(content: bytes) -> JobView:
    """Return the view that the reflector makes: with a spec or an error, whatever is nested."""
    view = job_view({"metadata": METADATA, "spec": as_kopf_reads(content)})
    assert bool(view.spec) != bool(view.spec_error)
    written_back(dataclasses.replace(TRAINS, job=dataclasses.replace(view, status=TRAINS.job.status)))
    return view


def written_back(observed: JobObservation) -> JobStatus:
    """Return the status that a plan for the observation writes, as the API server stores it."""
    return JobStatus.model_validate_json(json.dumps(plan(observed, jobs.T0 + 20).status.manifest(), allow_nan=False))


def status(content: bytes) -> JobStatus:
    """Return the status that a plan writes after the operator has read this one."""
    raw_status = as_kopf_reads(content)
    view = job_view({"metadata": METADATA, "spec": {}, "status": raw_status if isinstance(raw_status, dict) else {}})
    return written_back(dataclasses.replace(TRAINS, job=dataclasses.replace(TRAINS.job, status=view.status)))


def refused(content: bytes) -> ApiError:
    errors = [from_status(code, content) for code in (400, 403, 404, 409, 410, 422, 500)]
    assert all(isinstance(refusals.refusal(each), Refusal) for each in errors if isinstance(each, Forbidden))
    return errors[1]


def said(content: bytes) -> int | None:
    room.excluded(text(content))
    return room.fits_quota(text(content))


def in_a_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def of(content: bytes) -> object:
        (FOLDER / name).write_bytes(content)
        return read(FOLDER / name)

    return of


def environment(content: bytes) -> settings.OperatorSettings:
    parsed: Any = json.loads(content)
    named = parsed.items() if isinstance(parsed, dict) else ()
    return settings.from_environment({str(name): str(value) for name, value in named})


MANY = 100_000
"""Maximum length of an error in characters: it has a sentence for each field, with the field's name."""
NOT_JSON = (ValueError, RecursionError)
"""Errors of the test's own decoding."""
READERS = {
    "a spec that is stored": Reader(
        spec, [json.dumps(each).encode() for each in SPECS], (SpecError, *NOT_JSON), JobSpec, MANY
    ),
    "a spec that is written": Reader(written, [json.dumps(SPECS[1]).encode()], (SpecError, *NOT_JSON), JobSpec, MANY),
    "a view of a job": Reader(viewed, [json.dumps(each).encode() for each in SPECS], (ValueError,), JobView),
    "a status": Reader(status, [STATUS], (ValueError,), JobStatus),
    "what is nested": Reader(deep_json.loads, [json.dumps(JOB).encode()], (ValueError,)),
    "what is nested, for kopf": Reader(as_kopf_reads, [json.dumps(JOB).encode()], (ValueError,)),
    "a refusal": Reader(refused, [json.dumps(REFUSED).encode()], (), ApiError),
    "why there is no room": Reader(said, SAYS, (), (int, type(None))),
    "the end of a command in a pod": Reader(
        lambda content: outcome(content, "said"), [json.dumps(EXECUTED).encode(), b""], (), str
    ),
    "taints": Reader(lambda content: notice_taints.parse(text(content)), [b"a, b=c,,"], (), tuple),
    "a manifest in a file": Reader(
        in_a_file("job.yaml", read_manifest), [json.dumps(JOB).encode()], (UserError,), dict
    ),
    "a kubeconfig": Reader(
        in_a_file("config", lambda file: asyncio.run(access.load(str(file)))),
        [json.dumps(KUBECONFIG).encode()],
        (access.NoAccess,),
        access.Access,
    ),
    "the operator's environment": Reader(
        environment,
        [json.dumps(ENVIRONMENT).encode()],
        (settings.OperatorSettingsError, *NOT_JSON),
        settings.OperatorSettings,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_what_is_strange_is_refused_by_name(name: str) -> None:
    assert plays(READERS, name, 60) == 60


@pytest.mark.long(law=f"{HERE}::test_what_is_strange_is_refused_by_name")
@pytest.mark.timeout(1200)
def test_so_are_many_more(request: pytest.FixtureRequest) -> None:
    all_of("operator", READERS, request)
