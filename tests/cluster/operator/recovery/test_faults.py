"""Invalid input and faults, on a real API server: nothing is lost, and the status says what to do."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator
from concertina.api import API_VERSION
from concertina.controller import master_keys
from concertina.controller.settings import from_environment
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.kube.watch.trainingjobs import list_jobs
from concertina.local.errors import LocalClusterError

pytestmark = pytest.mark.usefixtures("operator")
SAY = "import os; print('rank', os.environ['RANK'])"
STAY = SAY + "; import time; time.sleep(3600)"
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
TRAINER = {"steps": 3, "data": {"uri": "/nowhere"}}
Object = dict[str, Any]


def test_a_quota_that_refuses_a_pod_is_waited_for(jobs: Jobs) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    path = f"/api/v1/namespaces/{jobs.namespace}/resourcequotas"
    jobs.cluster.api.call("POST", path, quota)
    jobs.cluster.kubectl(
        "wait", "quota/few", "-n", jobs.namespace, "--for=jsonpath={.status.hard.pods}=1", "--timeout=60s"
    )
    jobs.create("a", SAY, replicas=2)
    job = jobs.wait("a", lambda job: "exceeded quota: few" in jobs.condition(job, "Ready").get("message", ""))
    assert jobs.condition(job, "Failed")["status"] == "False"
    assert len(jobs.pods("a")) == 1
    jobs.cluster.kubectl("delete", "quota", "few", "-n", jobs.namespace)
    job = jobs.wait_true("a", "Complete")
    assert job["status"]["restarts"]["total"] == 0


@pytest.mark.long(law="tests/unit/agent/core/test_ends.py::test_succeeded_is_when_all_are")
def test_a_worker_that_exits_0_early_does_not_end_the_job(jobs: Jobs) -> None:
    """Success is exit code 0 of every worker, as under torchrun. (The bundled trainer's workers may not end early.)"""
    jobs.create("a", SAY + "; import time; time.sleep(3 * int(os.environ['RANK']))", replicas=2)
    coordinator = jobs.wait_training("a", 2)["status"]["world"]["coordinator"]
    jobs.wait("a", lambda _: '"event":"worker_ended"' in jobs.logs(coordinator))
    assert jobs.condition(jobs.get("a"), "Complete")["status"] == "False"
    job = jobs.wait_true("a", "Complete")
    assert (job["status"].get("rounds", 0), job["status"]["restarts"]["total"]) == (1, 0)
    jobs.wait("a", lambda _: [pod["status"]["phase"] for pod in jobs.pods("a")] == ["Succeeded", "Succeeded"])
    assert "rank 0" in jobs.logs(coordinator)


@pytest.mark.long(law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_two_jobs_on_one_checkpoint_uri")
def test_two_jobs_on_one_checkpoint_uri(jobs: Jobs) -> None:
    """The job that has begun owns the URI."""
    checkpoint = {"uri": f"file:///tmp/{jobs.namespace}/run"}
    jobs.create("first", "import time; time.sleep(600)", checkpoint=checkpoint)
    jobs.wait_training("first", 1)
    jobs.create("second", SAY, checkpoint=checkpoint)
    second = jobs.wait_true("second", "Stalled")
    assert f"{jobs.namespace}/first" in jobs.condition(second, "Stalled")["message"]
    assert jobs.pods("second") == []
    jobs.delete("first")
    jobs.wait_true("second", "Complete")


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_an_image_that_can_not_be_had_stalls_the_job_until_it_can"
)
def test_an_image_that_cannot_be_had(jobs: Jobs) -> None:
    containers = [{"name": "trainer", "image": "foreign/image:1", "command": ["x"]}]
    jobs.create("a", pod={"containers": containers})
    job = jobs.wait("a", lambda job: "foreign/image" in jobs.condition(job, "Ready").get("message", ""))
    assert jobs.condition(job, "Stalled")["status"] == "True"
    assert "--image" in jobs.condition(job, "Stalled")["message"]
    jobs.patch("a", {"suspend": True})
    jobs.wait_true("a", "Suspended")
    containers = [{"name": "trainer", "image": "concertina/trainer:test", "command": ["python3", "-c", SAY]}]
    jobs.patch("a", {"template": {"spec": {"containers": containers}}})
    jobs.patch("a", {"suspend": False})
    jobs.wait_true("a", "Complete")


@pytest.mark.long(law="tests/unit/plan/pods/test_refusals.py::test_a_job_that_trains_goes_on_and_a_person_is_told_once")
def test_a_job_recovers_while_no_pod_can_be_made(jobs: Jobs) -> None:
    """An admission webhook is broken, as it is while its own pod is down."""
    webhook = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": jobs.namespace},
        "webhooks": [
            {
                "name": "broken.example.com",
                "clientConfig": {"url": "https://127.0.0.1:1/"},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": jobs.namespace}},
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
            }
        ],
    }
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    before = jobs.wait_training("a", 2)["status"]["world"]
    jobs.cluster.api.call("POST", path, webhook)
    try:
        jobs.kill_pod(before["coordinator"])
        job = jobs.wait_training("a", 1, past=before["round"])
        assert before["coordinator"] not in jobs.members(job)
        condition = jobs.condition(jobs.wait_true("a", "Degraded"), "Degraded")
        assert condition["reason"] == "PodRefused"
        assert 'failed calling webhook "broken.example.com"' in condition["message"]
    finally:
        jobs.cluster.api.call("DELETE", f"{path}/{jobs.namespace}")
    jobs.wait_training("a", 2, past=job["status"]["world"]["round"])


def test_a_manifest_that_got_past_an_older_crd(jobs: Jobs) -> None:
    """The manifest is stored as if before the rule existed: the CRD is loosened, and made strict again."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.concertina.dev"
    kubectl = jobs.cluster.kubectl
    crd = json.loads(kubectl("get", "crd", "trainingjobs.concertina.dev", "-o", "json"))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    field = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/replicas"
    assert jobs.cluster.api.exists(path)
    loose = [{"op": "replace", "path": field, "value": {**spec["properties"]["replicas"], "maximum": 99999}}]
    strict = [{"op": "replace", "path": field, "value": spec["properties"]["replicas"]}]
    kubectl("patch", "crd", "trainingjobs.concertina.dev", "--type=json", "-p", json.dumps(loose))
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                jobs.create("bad", SAY, replicas=50000)
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.2)
    finally:
        kubectl("patch", "crd", "trainingjobs.concertina.dev", "--type=json", "-p", json.dumps(strict))
    jobs.create("good", SAY)
    bad = jobs.wait_true("bad", "Stalled")
    assert "spec.replicas must be at most 1024," in jobs.condition(bad, "Stalled")["message"]
    assert jobs.pods("bad") == []
    jobs.wait_true("good", "Complete")


@pytest.mark.long(
    law="tests/unit/controller/test_cache.py::test_a_job_that_nobody_can_read_is_left_alone_and_the_others_are_known"
)
def test_manifests_that_are_nested_deeply_are_their_senders_own_affair(jobs: Jobs, operator: Operator) -> None:
    """The API server accepts them. Python's decoder fails for the list or the event that contains one."""

    depths = (90, 300, 900, 9000)
    for depth in depths:
        container = {"name": "trainer", "image": "i", "command": ["x"]}
        job = {
            "apiVersion": "concertina.dev/v1beta1",
            "kind": "TrainingJob",
            "metadata": {"name": f"deep-{depth}"},
            "spec": {"template": {"spec": {"affinity": "HERE", "containers": [container]}}},
        }
        manifest = json.dumps(job).replace('"HERE"', '{"a":' * depth + "1" + "}" * depth)
        jobs.cluster.kubectl("create", "-n", jobs.namespace, "--validate=false", "-f", "-", stdin=manifest)
    jobs.create("a", SAY)
    jobs.wait_true("a", "Complete")
    operator.end()
    operator.start()
    jobs.create("b", SAY)
    jobs.wait_true("b", "Complete")
    for depth in depths:
        wait = ("wait", f"tj/deep-{depth}", "-n", jobs.namespace, "--for=condition=Stalled", "--timeout=60s")
        jobs.cluster.kubectl(*wait)
        jobs.cluster.kubectl("delete", f"tj/deep-{depth}", "-n", jobs.namespace, "--wait=true")


def test_a_template_of_odd_values_is_its_senders_own_affair(jobs: Jobs, operator: Operator) -> None:
    """The schema has the types of a pod's fields. asyncTensor requests the number of GPUs in the first pass."""

    def job(name: str, resources: Any) -> str:
        container = {"name": "trainer", "image": "i", "resources": resources}
        spec = {
            "replicas": 2,
            "parallelism": {"tensor": 2, "asyncTensor": True},
            "trainer": {"steps": 10, "data": {"uri": "/data"}},
            "template": {"spec": {"containers": [container]}},
        }
        metadata = {"name": name}
        return json.dumps({"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": metadata, "spec": spec})

    def create(name: str, resources: Any) -> None:
        arguments = ("create", "-n", jobs.namespace, "--validate=false", "-f", "-")
        jobs.cluster.kubectl(*arguments, stdin=job(name, resources))

    with pytest.raises(LocalClusterError, match="resources in body must be of type object"):
        create("refused", "x")
    create("odd", {"limits": {"nvidia.com/gpu": "1e9999"}})
    create("negative", {"limits": {"nvidia.com/gpu": -1}})
    for name in ("odd", "negative"):
        jobs.wait_true(name, "Stalled")
    operator.end()
    operator.start()
    jobs.create("a", SAY)
    jobs.wait_true("a", "Complete")


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_deletion.py::test_no_pod_is_made_after_the_deletion_and_none_is_announced"
)
def test_a_job_that_is_deleted_while_it_starts(jobs: Jobs, operator: Operator) -> None:
    for delay in (0.0, 0.6):
        jobs.create("a", STAY, replicas=2)
        time.sleep(delay)
        jobs.delete("a")
        jobs.wait_gone("tj/a")
    jobs.wait_gone("pod,secret", "-l", "app.kubernetes.io/managed-by=concertina")
    jobs.create("a", SAY, replicas=3)
    jobs.wait_true("a", "Complete")


async def what_an_operator_reads_first(jobs: Jobs, operator: Operator) -> set[str]:
    """Return what an operator reads first: the master key, and all jobs of this namespace by name."""
    settings = from_environment(operator.environment)
    async with Client(await access.load(str(jobs.cluster.kubeconfig)), give_up_after=0.5) as client:
        await master_keys.read(client, settings)
        objects = list[Raw]()
        await list_jobs(client, None, objects.append)
    return {job["metadata"]["name"] for job in objects if job["metadata"]["namespace"] == jobs.namespace}


def test_an_api_server_that_is_restarted(jobs: Jobs, operator: Operator) -> None:
    assert operator.process is not None
    process = operator.process.pid
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    before = jobs.wait_training("a", 2)
    jobs.cluster.kill_component("kube-apiserver")
    with ThreadPoolExecutor(1) as beside:
        started = beside.submit(asyncio.run, what_an_operator_reads_first(jobs, operator))
        time.sleep(3)
        assert not started.done(), "it waits for the API server, however long it takes"
        jobs.cluster.start_component("kube-apiserver")
        jobs.cluster.wait_api()
        assert started.result(timeout=60) == {"a"}
    # The operator waited for the API server without a restart, and the round continued.
    jobs.create("b", SAY)
    jobs.wait_true("b", "Complete")
    assert operator.process.poll() is None
    assert operator.process.pid == process
    after = jobs.get("a")
    assert after["status"]["world"]["round"] == before["status"]["world"]["round"]
    assert jobs.members(after) == jobs.members(before)
    # The operator also sees what happened to the job meanwhile.
    victim = jobs.members(after)[1]
    jobs.kill_pod(victim)
    jobs.wait("a", lambda job: job["status"]["world"].get("round", 0) > before["status"]["world"]["round"])
    jobs.wait_training("a", 2)


DIES = "tests/cluster/operator/recovery/test_faults.py::test_a_node_that_dies_without_a_word_and_comes_back[OnFailure]"


@pytest.mark.parametrize("policy", ["OnFailure", pytest.param("Never", marks=pytest.mark.long(law=DIES))])
def test_a_node_that_dies_without_a_word_and_comes_back(jobs: Jobs, policy: str) -> None:
    """With OnFailure, the node's pod restarts there under another address."""
    cluster = jobs.cluster
    jobs.create("a", STAY, replicas=3, elastic=ELASTIC, pod={"restartPolicy": policy})
    before = jobs.wait_training("a", 3)
    nodes = {member["node"] for member in before["status"]["world"]["members"]}
    assert len(nodes) == 3, "replicas were not spread"
    victim = before["status"]["world"]["members"][1]
    cluster.kill_node(victim["node"])
    try:
        shrunk = jobs.wait_training("a", 2)
        assert victim["replica"] not in jobs.members(shrunk)
    finally:
        cluster.start_node(victim["node"])
    after = jobs.wait_training("a", 3)
    uids = dict(zip(jobs.members(before), jobs.members(before, "uid"), strict=True))
    survivors = set(uids.values()) - {uids[victim["replica"]]}
    assert survivors <= {*jobs.members(after, "uid")}
    cluster.wait_nodes()


@pytest.mark.long(
    law="tests/cluster/operator/recovery/test_faults.py::test_a_node_that_dies_without_a_word_and_comes_back"
)
def test_a_node_that_is_stopped_and_goes_on(jobs: Jobs) -> None:
    """The fault is a partition. When the node's agent continues, it is in an old round, and is ignored."""
    cluster = jobs.cluster
    jobs.create("a", STAY, replicas=3, elastic=ELASTIC)
    before = jobs.wait_training("a", 3)
    victim = before["status"]["world"]["members"][2]
    cluster.stop_node(victim["node"])
    try:
        shrunk = jobs.wait_training("a", 2)
        assert victim["replica"] not in jobs.members(shrunk)
    finally:
        cluster.cont_node(victim["node"])
    jobs.wait_training("a", 3)
    cluster.wait_nodes()
