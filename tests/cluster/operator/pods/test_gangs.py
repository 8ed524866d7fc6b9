"""Gang scheduling by the real scheduler, with feature gates that Kubernetes leaves off: two jobs of which one fits.

The cluster enforces permissions for owner references, as OpenShift does: the operator needs them for pods, Secrets and
PodGroups. That admission does not know a new CRD for up to 30 s, so the first job's creates are refused for a while.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from builders.cluster.crds import wait_established
from builders.cluster.operator_process import ROOT, Jobs, Operator, install
from builders.gang_crds import FOLDER
from builders.until import until
from concertina.local import cluster as local
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.state import lifetime
from concertina.local.state.record import Options

HERE = "tests/cluster/operator/pods/test_gangs.py"
LAW = f"{HERE}::test_two_jobs_of_which_one_fits_never_hold_halves[1.36]"
NEXT = [
    pytest.mark.long(law=LAW),
    pytest.mark.skipif(not programs.ready(programs.NEXT_KUBERNETES), reason="`make next-kubernetes` builds it, once"),
]
STAY = "import time; time.sleep(3600)"
GPU = "nvidia.com/gpu"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates"


@dataclass(frozen=True)
class Gangs:
    """Cluster of three nodes with a GPU each, with a scheduler that supports gangs, and an operator."""

    cluster: LocalCluster
    api: str
    """API of Kubernetes' PodGroup."""
    is_mutable: bool


@pytest.fixture(scope="module", params=[pytest.param(False, id="1.36"), pytest.param(True, id="1.37", marks=NEXT)])
def gangs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    name = f"gangs-{os.getpid()}"
    options = Options(nodes=3, gpus=1, gang_scheduling=True, owner_permissions=True, next_kubernetes=request.param)
    with local.owned(name, options, print) as cluster:
        for crd in (ROOT / "crds", FOLDER / "volcano.yaml", FOLDER / "coscheduling.yaml"):
            cluster.kubectl("apply", "--server-side", "-f", str(crd))
        wait_established(cluster.api)
        operator = Operator(tmp_path_factory.mktemp("operator"), install(cluster, tmp_path_factory.mktemp("installed")))
        operator.start()
        yield Gangs(cluster, "v1beta1" if request.param else "v1alpha2", is_mutable=request.param)
        operator.end(signal.SIGTERM)
        assert "traceback" not in operator.text()
    lifetime.forget(name)


@pytest.fixture
def jobs(gangs: Gangs) -> Iterator[Jobs]:
    namespace = f"t-{uuid.uuid4().hex[:8]}"
    gangs.cluster.create_namespace(namespace)
    yield Jobs(gangs.cluster, namespace)
    gangs.cluster.kubectl("delete", "namespace", namespace, timeout=200)


def create(jobs: Jobs, name: str, gang: str | None, replicas: int = 2, **spec: Any) -> None:
    """Create a job whose replicas take a node's only GPU each."""
    container = {
        "name": "trainer", "image": "concertina/trainer:test", "command": ["python3", "-uc", STAY],
        "resources": {"limits": {GPU: "1"}},
    }  # fmt: skip
    jobs.create(
        name, replicas=replicas, scheduling={"gang": gang} if gang else {}, pod={"containers": [container]}, **spec
    )


def nodes(jobs: Jobs, name: str) -> list[str]:
    return [pod["spec"]["nodeName"] for pod in jobs.pods(name) if pod["spec"].get("nodeName")]


def groups(jobs: Jobs, api: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = jobs.cluster.api.call("GET", f"/apis/{api}/namespaces/{jobs.namespace}/podgroups")[
        "items"
    ]
    return items


def group_of(jobs: Jobs, name: str, api: str) -> dict[str, Any]:
    (group,) = groups_of(jobs, name, api)
    return group


def groups_of(jobs: Jobs, name: str, api: str) -> list[dict[str, Any]]:
    return [group for group in groups(jobs, api) if group["metadata"]["ownerReferences"][0]["name"] == name]


def test_two_jobs_of_which_one_fits_never_hold_halves(gangs: Gangs, jobs: Jobs) -> None:
    api = f"scheduling.k8s.io/{gangs.api}"
    create(jobs, "first", "PodGroup")
    first = jobs.wait_training("first", 2)
    mark = first["status"]["gang"]
    assert (mark["mechanism"], mark["apiVersion"], mark["minCount"]) == ("PodGroup", api, 2)
    assert group_of(jobs, "first", api)["metadata"]["name"] == mark["podGroup"]

    create(jobs, "second", "PodGroup")

    def second_does_not_fit() -> bool:
        return any(
            condition["type"].startswith("PodGroup") and condition["status"] == "False"
            for group in groups_of(jobs, "second", api)
            for condition in group.get("status", {}).get("conditions", ())
        )

    until(
        second_does_not_fit, "the scheduler's word that the second gang does not fit", lambda: jobs.describe("second")
    )
    assert len(jobs.pods("second")) == 2
    assert nodes(jobs, "second") == []

    create(jobs, "single", None)
    until(lambda: nodes(jobs, "single"), "half of a job that is no gang", lambda: jobs.describe("single"))
    jobs.delete("single")
    jobs.wait_gone("pod", "-l", "concertina.dev/job=single")
    assert nodes(jobs, "second") == []

    jobs.delete("first")
    jobs.wait_training("second", 2)
    until(lambda: len(groups(jobs, api)) == 1, "the first job's group to be gone with it")


@pytest.mark.long(
    law="tests/unit/plan/facts/test_gangs.py::test_a_group_whose_minimum_is_immutable_stays_while_a_pod_of_it_has_a_node"
)
def test_the_group_follows_the_minimum_and_a_suspended_job_has_none(gangs: Gangs, jobs: Jobs) -> None:
    api = f"scheduling.k8s.io/{gangs.api}"
    window = {"scaleUp": {"stabilizationWindowSeconds": 0}}
    create(jobs, "a", "PodGroup", replicas=3, elastic={"minReplicas": 2, **window})
    jobs.wait_training("a", 3)

    def minimum() -> int:
        count: int = group_of(jobs, "a", api)["spec"]["schedulingPolicy"]["gang"]["minCount"]
        return count

    assert minimum() == 2
    jobs.patch("a", {"elastic": {"minReplicas": 1}})
    if gangs.is_mutable:
        until(lambda: minimum() == 1, "the new minimum")
    jobs.kill_pod("a-2-0")
    jobs.wait(
        "a", lambda job: "a-2-1" in jobs.members(job) and job["status"]["gang"]["minCount"] == minimum()
    )  # fmt: skip
    jobs.patch("a", {"suspend": True})
    jobs.wait_true("a", "Suspended")
    until(lambda: not groups(jobs, api), "no group of a suspended job")
    jobs.patch("a", {"suspend": False})
    jobs.wait_training("a", 3, past=1)
    assert minimum() == 1


def test_auto_takes_a_beta_and_no_alpha(gangs: Gangs, jobs: Jobs) -> None:
    create(jobs, "a", "Auto")
    mark = jobs.wait_training("a", 2)["status"]["gang"]
    assert mark.get("mechanism") == ("PodGroup" if gangs.is_mutable else None)
    assert "the scheduler is default-scheduler" in mark["message"]


def test_objects_of_other_schedulers_are_stored_and_a_missing_one_is_refused_by_name(gangs: Gangs, jobs: Jobs) -> None:
    create(jobs, "volcano", "Volcano")
    pods = until(lambda: listed if len(listed := jobs.pods("volcano")) == 2 else None, "pods for Volcano")
    group = group_of(jobs, "volcano", "scheduling.volcano.sh/v1beta1")
    assert group["spec"] == {"minMember": 2, "queue": "default"}
    assert {pod["spec"]["schedulerName"] for pod in pods} == {"volcano"}
    annotation = "scheduling.k8s.io/group-name"
    assert {pod["metadata"]["annotations"][annotation] for pod in pods} == {group["metadata"]["name"]}
    jobs.patch("volcano", {"elastic": {"minReplicas": 1}})
    until(
        lambda: group_of(jobs, "volcano", "scheduling.volcano.sh/v1beta1")["spec"]["minMember"] == 1, "the new minimum"
    )
    create(jobs, "plugin", "Coscheduling")
    jobs.wait_training("plugin", 2)  # The default scheduler lacks the plugin, and schedules pods one by one.
    assert group_of(jobs, "plugin", "scheduling.x-k8s.io/v1alpha1")["spec"] == {"minMember": 2}
    create(jobs, "kai", "KAI")
    job = jobs.wait_true("kai", "Stalled")
    stalled = jobs.condition(job, "Stalled")
    assert stalled["reason"] == "GangNotServed"
    assert "scheduling.run.ai/v2alpha2" in stalled["message"]
    assert jobs.pods("kai") == []


def test_claims_of_the_template_reach_the_pods(gangs: Gangs, jobs: Jobs) -> None:
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com", "count": 2}}
    gangs.cluster.api.call(
        "POST", CLAIMS.format(jobs.namespace),
        {"metadata": {"name": "gpus"}, "spec": {"spec": {"devices": {"requests": [request]}}}},
    )  # fmt: skip
    claims = [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
    container = {
        "name": "trainer", "image": "concertina/trainer:test", "command": ["python3", "-uc", STAY],
        "resources": {"claims": [{"name": "gpus", "request": "gpu"}]},
    }  # fmt: skip
    jobs.create("a", workersPerReplica=2, pod={"containers": [container], "resourceClaims": claims})
    (pod,) = until(lambda: jobs.pods("a"), "a pod with a claim", lambda: json.dumps(jobs.get("a")))
    assert pod["spec"]["resourceClaims"] == claims
    (trainer,) = (each for each in pod["spec"]["containers"] if each["name"] == "trainer")
    assert trainer["resources"]["claims"] == [{"name": "gpus", "request": "gpu"}]
