"""Creates that the real API server refuses: those that need a person are reported at once, the others are retried.

Names that other pods hold do not block a job.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator
from builders.until import until
from concertina.local.control_plane.certificates import ClusterAuthority
from concertina.local.errors import LocalClusterError

pytestmark = pytest.mark.usefixtures("operator")
SAY = "import os; print('rank', os.environ['RANK'])"
STAY = SAY + "; import time; time.sleep(3600)"
IMAGE = "concertina/trainer:test"
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
Object = dict[str, Any]


def stalled(jobs: Jobs, name: str = "a", kind: str = "Stalled") -> Object:
    """Return the condition of that type, as soon as the job's pods were refused for good."""
    job = jobs.wait(name, lambda job: jobs.condition(job, kind).get("reason") == "PodRefused")
    condition = jobs.condition(job, kind)
    assert condition["status"] == "True"
    return condition


def test_a_value_that_no_pod_takes_stalls_the_job_until_it_is_mended(jobs: Jobs, operator: Operator) -> None:
    """The template's schema has the fields of a pod, but not the API server's rules for their values."""
    jobs.create("a", SAY, replicas=3, pod={"activeDeadlineSeconds": -1})
    assert "spec.activeDeadlineSeconds: Invalid value: -1" in stalled(jobs)["message"]
    assert jobs.condition(jobs.get("a"), "Ready")["reason"] == "Stalled"
    jobs.events("a", "PodRefused")

    def refused() -> list[str]:
        return [line["pod"] for line in operator.lines("create refused", f"{jobs.namespace}/a")]

    until(lambda: len(refused()) >= 5, "five refusals", refused)
    assert sorted(refused()[:3]) == ["a-0-0", "a-1-0", "a-2-0"]
    assert set(refused()[3:]) == {"a-0-0"}, "one at a time from then on"
    jobs.patch("a", {"suspend": True})
    jobs.wait_true("a", "Suspended")
    containers = [{"name": "trainer", "image": IMAGE, "command": ["python3", "-c", SAY]}]
    jobs.patch("a", {"suspend": False, "template": {"spec": {"activeDeadlineSeconds": None, "containers": containers}}})
    assert jobs.condition(jobs.wait_true("a", "Complete"), "Stalled")["status"] == "False"


def test_a_policy_that_refuses_pods_is_found_to_be_mended(jobs: Jobs) -> None:
    jobs.cluster.kubectl("label", "ns", jobs.namespace, RESTRICTED)
    jobs.create("a", SAY)
    assert "violates PodSecurity" in stalled(jobs)["message"]
    jobs.cluster.kubectl("label", "ns", jobs.namespace, RESTRICTED.split("=")[0] + "-")
    jobs.wait_true("a", "Complete")


@pytest.mark.long(
    law="tests/cluster/operator/pods/test_refusals.py::test_a_policy_that_refuses_pods_is_found_to_be_mended"
)
def test_a_service_account_that_is_missing_is_named_and_waited_for(jobs: Jobs) -> None:
    jobs.create("a", SAY, pod={"serviceAccountName": "late"})
    assert 'serviceaccount "late" not found' in stalled(jobs)["message"]
    jobs.cluster.kubectl("create", "serviceaccount", "late", "-n", jobs.namespace)
    jobs.wait_true("a", "Complete")


@pytest.mark.long(law="tests/unit/plan/pods/test_refusals.py::test_a_job_that_trains_goes_on_and_a_person_is_told_once")
def test_a_job_trains_on_while_a_replacement_is_refused(jobs: Jobs) -> None:
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    coordinator, lost = jobs.members(jobs.wait_training("a", 2))
    jobs.cluster.kubectl("label", "ns", jobs.namespace, RESTRICTED)
    jobs.kill_pod(lost)
    assert "violates PodSecurity" in stalled(jobs, kind="Degraded")["message"]
    assert jobs.members(jobs.wait_training("a", 1)) == [coordinator]
    assert jobs.condition(jobs.get("a"), "Degraded")["status"] == "True"
    jobs.cluster.kubectl("label", "ns", jobs.namespace, RESTRICTED.split("=")[0] + "-")
    job = jobs.wait_training("a", 2)
    assert coordinator in jobs.members(job)
    jobs.wait("a", lambda job: jobs.condition(job, "Degraded")["status"] == "False")


class Conflicts(BaseHTTPRequestHandler):
    """Admission webhook that answers the first create of each kind as a quota does when two writes conflict."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        kind, seen = request["kind"]["kind"], self.server.seen  # type: ignore[attr-defined]
        response = {"uid": request["uid"], "allowed": kind in seen}
        if kind not in seen:
            seen.add(kind)
            response["status"] = {"code": 409, "reason": "Conflict", "message": "the object has been modified"}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def conflicts(jobs: Jobs, tmp_path: Path) -> Iterator[set[str]]:
    """Yield the kinds of which the webhook has refused one in the test's namespace, as soon as it is called."""
    authority = ClusterAuthority.create(tmp_path / "ca")
    pair = authority.issue("webhook", "webhook", hosts=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Conflicts)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    seen: set[str] = set()
    server.seen = seen  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hook = {
        "name": "conflicts.concertina.test",
        "clientConfig": {
            "url": f"https://127.0.0.1:{server.server_port}/",
            "caBundle": base64.b64encode(authority.pair.certificate.read_bytes()).decode(),
        },
        "rules": [
            {
                "operations": ["CREATE"],
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods", "secrets", "configmaps"],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": jobs.namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": jobs.namespace},
        "webhooks": [hook],
    }
    jobs.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(configuration))
    try:

        def asked() -> bool:
            probe = ("create", "configmap", "probe", "-n", jobs.namespace, "--dry-run=server")
            with suppress(LocalClusterError):
                jobs.cluster.kubectl(*probe)
            return bool(seen)

        until(asked, "what the operator asks for")
        yield seen
    finally:
        jobs.cluster.kubectl("delete", "validatingwebhookconfiguration", jobs.namespace)
        server.shutdown()
        server.server_close()


def test_a_conflict_is_not_taken_for_an_object_that_is_there(jobs: Jobs, conflicts: set[str]) -> None:
    jobs.create("a", SAY)
    job = jobs.wait_true("a", "Complete")
    assert {"Secret", "Pod"} <= conflicts
    assert job["status"]["restarts"]["total"] == 0


@pytest.mark.long(law="tests/unit/plan/pods/test_pods.py::test_a_dead_node_does_not_block_a_successor")
def test_a_job_made_again_does_not_wait_for_pods_on_a_dead_node(jobs: Jobs) -> None:
    cluster = jobs.cluster
    jobs.create("a", STAY, replicas=3)
    job = jobs.wait_training("a", 3)
    member, uid = job["status"]["world"]["members"][0], jobs.members(job, "uid")[0]
    cluster.kill_node(member["node"])
    try:
        jobs.delete("a")
        jobs.wait_gone("tj/a")
        elsewhere = {"key": "metadata.name", "operator": "NotIn", "values": [member["node"]]}
        required = {"nodeSelectorTerms": [{"matchFields": [elsewhere]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        jobs.create("a", STAY, replicas=2, pod={"affinity": affinity})
        jobs.wait_training("a", 2)
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.pods("a")}
        assert uids[member["replica"]] == uid, "it is still there, and has its name"
    finally:
        cluster.start_node(member["node"])
    cluster.wait_nodes()


HELD = {"metadata": {"finalizers": ["concertina.test/held"]}}


@pytest.fixture
def held(jobs: Jobs) -> Iterator[None]:
    """Remove, at the end of the test, the finalizers that keep pods of the job `a` from being deleted."""
    yield
    for pod in jobs.pods("a"):
        if pod["metadata"].get("finalizers"):
            free = json.dumps({"metadata": {"finalizers": None}})
            jobs.cluster.kubectl("patch", "pod", pod["metadata"]["name"], "-n", jobs.namespace, "-p", free)


@pytest.mark.usefixtures("held")
def test_torchruns_pods_do_not_wait_for_those_of_the_job_before(jobs: Jobs) -> None:
    command = {"name": "trainer", "image": IMAGE, "command": ["sleep", "3600"]}
    spec: Object = {"replicas": 2, "launcher": "Torchrun", "pod": {"containers": [command]}}
    jobs.create("a", **spec)
    jobs.wait_reason("a", "Training")
    old = {pod["metadata"]["name"] for pod in jobs.pods("a")}
    assert old == {"a-rendezvous-1", "a-0-0", "a-1-0"}
    for name in old:
        jobs.cluster.kubectl("patch", "pod", name, "-n", jobs.namespace, "-p", json.dumps(HELD))
    jobs.delete("a")
    jobs.wait_gone("tj/a")
    jobs.create("a", **spec)
    jobs.wait_reason("a", "Training")
    assert {pod["metadata"]["name"] for pod in jobs.pods("a")} == old | {"a-rendezvous-2", "a-0-1", "a-1-1"}


@pytest.mark.long(law="tests/unit/plan/pods/test_pods.py::test_names_that_other_pods_hold_are_passed_over")
def test_a_persons_own_pod_that_has_the_name_is_left_alone(jobs: Jobs) -> None:
    container = {"name": "x", "image": IMAGE, "command": ["sleep", "3600"]}
    foreign = {"metadata": {"name": "a-0-0"}, "spec": {"containers": [container]}}
    path = f"/api/v1/namespaces/{jobs.namespace}/pods"
    jobs.cluster.api.call("POST", path, foreign)
    jobs.create("a", SAY)
    jobs.wait_true("a", "Complete")
    assert "deletionTimestamp" not in jobs.cluster.api.call("GET", f"{path}/a-0-0")["metadata"]
    assert [pod["metadata"]["name"] for pod in jobs.pods("a")] == ["a-0-1"]
