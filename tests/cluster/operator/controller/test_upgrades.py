"""Operator beside a CRD of another version, as during an upgrade."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster.operator_process import Jobs, Operator
from builders.until import until
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane.api import ControlPlaneError

pytestmark = pytest.mark.usefixtures("operator")
OURS = yaml.safe_load((Path(__file__).resolve().parents[4] / "crds" / "concertina.dev_trainingjobs.yaml").read_text())
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.concertina.dev"
SAY = "print('hello')"
Object = dict[str, Any]
Install = Callable[[Object, Callable[[], bool]], None]


def schema(crd: Object) -> Object:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


@pytest.fixture
def install(cluster: LocalCluster) -> Iterator[Install]:
    """Install another CRD until the test is over; return when the API server uses it."""

    def put(crd: Object) -> None:
        version = cluster.api.call("GET", CRD)["metadata"]["resourceVersion"]
        cluster.api.call("PUT", CRD, {**crd, "metadata": {**crd["metadata"], "resourceVersion": version}})

    def install(crd: Object, served: Callable[[], bool]) -> None:
        put(crd)
        until(served, "the CRD that was put")

    yield install
    put(OURS)


def test_a_crd_that_is_newer_than_the_operator(jobs: Jobs, install: Install, operator: Operator) -> None:
    """The CRD has one more field with a default, and one that a user sets. Jobs run, and report the ignored fields."""
    operator.end(signal.SIGTERM)  # For a moment, an open watch sends objects as the old CRD has them.
    crd = copy.deepcopy(OURS)
    spec = schema(crd)["spec"]["properties"]
    spec["failurePolicy"]["properties"]["patience"] = {"type": "string", "default": "Long"}
    spec["zones"] = {"type": "array", "items": {"type": "string"}}
    policy = {"maxRestarts": 3}
    jobs.create("before", SAY, suspend=True, failurePolicy=policy)
    install(crd, lambda: "patience" in jobs.get("before")["spec"]["failurePolicy"])
    operator.start()
    jobs.create("a", SAY, zones=["x"], failurePolicy=policy)
    job = jobs.wait_true("a", "Complete")
    assert job["spec"]["failurePolicy"]["patience"] == "Long"
    (event,) = jobs.events("a", "UnknownFields")
    assert "spec.failurePolicy.patience, spec.zones" in event["message"]
    assert event["type"] == "Warning"
    jobs.patch("before", {"suspend": False})
    jobs.wait_true("before", "Complete")
    assert "spec.failurePolicy.patience: " in jobs.events("before", "UnknownFields")[0]["message"]


def test_a_crd_that_is_older_than_the_operator(jobs: Jobs, install: Install, operator: Operator) -> None:
    """The API server prunes the fields of the status that it does not know.

    An event names each of them once in a namespace, and jobs run.
    """
    crd = copy.deepcopy(OURS)
    status = schema(crd)["status"]["properties"]
    del status["restarts"]["properties"]["budget"]
    jobs.create("before", SAY)
    jobs.wait_true("before", "Complete")
    install(crd, lambda: "budget" not in jobs.get("before")["status"]["restarts"])
    jobs.create("a", SAY, replicas=2)
    jobs.wait_true("a", "Complete")

    def of_budget() -> list[Object]:
        return [event for event in jobs.events(None, "OutdatedCRD") if "status.restarts.budget" in event["message"]]

    # The event is on the job whose status was written first: `before` may end meanwhile, with fewer fields.
    (event,) = until(of_budget, "an event of the field")
    assert "apply the crds/" in event["message"]
    lines = [line for line in operator.lines("outdated crd") if line["job"].startswith(f"{jobs.namespace}/")]
    assert sum("status.restarts.budget" in line["message"] for line in lines) == 1


def test_a_second_version_is_served_beside_the_stored_one(jobs: Jobs, install: Install) -> None:
    """A job that is written in the next version of the API runs under this operator."""
    crd = copy.deepcopy(OURS)
    (stored,) = crd["spec"]["versions"]
    crd["spec"]["versions"].append({**copy.deepcopy(stored), "name": "v1", "storage": False})
    path = jobs.path.replace("v1beta1", "v1")

    def served() -> bool:
        group = jobs.cluster.api.call("GET", "/apis/concertina.dev")
        return {"v1beta1", "v1"} <= {version["version"] for version in group["versions"]}

    install(crd, served)
    container = {"name": "trainer", "image": "concertina/trainer:test", "command": ["python3", "-uc", SAY]}
    body = {"apiVersion": "concertina.dev/v1", "kind": "TrainingJob", "metadata": {"name": "a"}}
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
    until(lambda: created(jobs, path, {**body, "spec": {"template": template}}), "a job of the second version")
    jobs.wait_true("a", "Complete")
    assert jobs.cluster.api.call("GET", f"{path}/a")["spec"] == jobs.get("a")["spec"]


def created(jobs: Jobs, path: str, body: Object) -> bool:
    """Return whether the API server accepts the object. It serves a version some moments after it lists it."""
    try:
        return bool(jobs.cluster.api.call("POST", path, body))
    except ControlPlaneError:
        return False
