"""Room and size on a real control plane: standby replicas, failing growth, competing jobs, and the real HPA."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster import metrics
from builders.cluster.operator_process import Jobs, standing_in
from builders.cluster.pods import Pods, condition
from concertina.kube.parse.views import pod_view
from concertina.local.cluster import LocalCluster
from concertina.plan.lifecycle.admission import PATIENCE
from concertina.plan.observed import PodView

pytestmark = pytest.mark.usefixtures("operator")
STAY = "import time; time.sleep(3600)"
SHORT = "import time; time.sleep(1)"
RIVALS = "tests/simulation/stories/test_rivals.py::test_jobs_that_need_the_same_nodes_all_complete"
FAILS_ON_THE_THIRD = "import os, sys; '-2-' in os.environ['CONCERTINA_REPLICA'] and sys.exit(1); " + STAY
Object = dict[str, Any]


def standby_replicas(job: Object) -> Object:
    counts: Object = job.get("status", {}).get("standbyReplicas", {})
    return counts


def test_a_spare_joins_a_job_of_fixed_size_when_a_member_is_lost(jobs: Jobs) -> None:
    jobs.create("a", STAY, replicas=2, elastic={"standbyReplicas": 1})
    jobs.wait("a", lambda job: standby_replicas(job).get("ready") == 1)
    job = jobs.wait_training("a", 2)
    assert job["status"]["replicas"] == 2, "a standby replica counts as a replica"
    (spare,) = standby_replicas(job)["names"]
    coordinator, lost = jobs.members(job)
    jobs.kill_pod(lost)
    after = jobs.wait_training("a", 2, past=job["status"]["world"]["round"])
    assert set(jobs.members(after)) == {coordinator, spare}
    # Another replica becomes the standby, without a round of its own.
    last = jobs.wait("a", lambda job: standby_replicas(job).get("ready") == 1)
    assert standby_replicas(last)["names"] not in ([spare], [lost])
    assert last["status"]["world"]["round"] == after["status"]["world"]["round"]


@pytest.mark.long(law="tests/unit/plan/rounds/test_growth.py::test_growing_waits_after_a_failure_and_says_so")
def test_growing_that_fails_is_not_tried_again_at_once(jobs: Jobs) -> None:
    elastic = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}}
    jobs.create("a", FAILS_ON_THE_THIRD, replicas=2, elastic=elastic, failurePolicy={"maxRestarts": 50})
    jobs.wait_training("a", 2)
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=3", "-n", jobs.namespace)
    job = jobs.wait("a", lambda job: "growing waits" in jobs.condition(job, "Ready").get("message", ""))
    assert "growing waits 10 s: replica a-2-0, which joined in round" in jobs.condition(job, "Ready")["message"]
    assert len(jobs.members(job)) == 2


def on(*nodes: str) -> Object:
    """Return the spec of a pod that needs one of the two GPUs of any of these nodes."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    command = {"command": ["python3", "-uc", SHORT], "resources": {"limits": {"nvidia.com/gpu": 1}}}
    return {"containers": [{"name": "trainer", "image": "concertina/trainer:test", **command}], "affinity": affinity}


def placed(jobs: Jobs, name: str) -> int:
    return sum("nodeName" in pod["spec"] for pod in jobs.pods(name))


@pytest.mark.long(law=RIVALS)
def test_two_jobs_that_each_hold_a_part_of_the_room_run_one_after_the_other(jobs: Jobs, pods: Pods) -> None:
    """Both jobs need four GPUs, and neither has all of them.

    The younger job holds three, one of which the older job lacks, and waits for one that another pod has. The older job
    holds two.
    """
    one, two, three = jobs.cluster.nodes()
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    pods.create("holder", STAY, gpu, nodeName=three)
    jobs.create("older", replicas=4, pod=on(one, two), suspend=True)
    time.sleep(1.1)  # The API server's creation times are whole seconds, so uids decide between equal times.
    jobs.create("younger", replicas=4, pod=on(two, three))
    jobs.wait("younger", lambda _: placed(jobs, "younger") == 3)
    jobs.patch("older", {"suspend": False})
    jobs.wait("older", lambda _: placed(jobs, "older") == 2)
    job = jobs.wait("younger", lambda job: job["status"].get("internal", {}).get("requeueState", {}).get("since"))
    message = jobs.condition(job, "Ready")["message"]
    assert "only 3 of the 4 required replicas have resources" in message
    assert f"releases them for {jobs.namespace}/older, whose turn it is" in message
    jobs.wait_true("older", "Complete")
    pods.delete("holder", gracePeriodSeconds=0)
    jobs.wait_true("younger", "Complete")
    assert jobs.get("older")["status"]["restarts"]["total"] == 0


@pytest.fixture
def elsewhere(cluster: LocalCluster, namespace: str) -> Iterator[list[Jobs]]:
    """Yield three other namespaces."""
    names = [f"{namespace}-{number}" for number in range(3)]
    for name in names:
        cluster.create_namespace(name)
    yield [Jobs(cluster, name) for name in names]
    cluster.kubectl("delete", "namespace", *names, "--wait=false")


@pytest.fixture
def urgent(cluster: LocalCluster, namespace: str) -> Iterator[str]:
    """Create a priority class that comes first and preempts no pod."""
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    made = {"metadata": {"name": namespace}, "value": 1000, "preemptionPolicy": "Never"}
    cluster.api.call("POST", path, made)
    yield namespace
    cluster.api.call("DELETE", f"{path}/{namespace}")


@pytest.mark.long(law=RIVALS)
def test_jobs_that_can_never_start_hold_nobody_up(jobs: Jobs, pods: Pods, elsewhere: list[Jobs], urgent: str) -> None:
    """None of the three jobs can start: no node fits the first, the second needs more GPUs than there are, and so on.

    The second one needs seven GPUs of six, and holds four; the third one's quota allows no pod. All are in other
    namespaces, and ahead of a job that needs all six GPUs and finds one, then five, then all.
    """
    one, two, three = jobs.cluster.nodes()
    pods.create("holder", STAY, {"resources": {"limits": {"nvidia.com/gpu": 1}}}, nodeName=three)
    nowhere, huge, refused = elsewhere
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    refused.cluster.api.call("POST", f"/api/v1/namespaces/{refused.namespace}/resourcequotas", quota)
    status = "--for=jsonpath={.status.hard.pods}=0"
    refused.cluster.kubectl("wait", "quota/none", "-n", refused.namespace, status, "--timeout=60s")
    nowhere.create("alien", SHORT, replicas=2, pod={"nodeSelector": {"no": "node"}, "priorityClassName": urgent})
    refused.create("alien", SHORT, replicas=2, pod={"priorityClassName": urgent})
    huge.create("alien", replicas=7, pod=on(one, two))
    huge.wait("alien", lambda _: placed(huge, "alien") == 4)
    refused.wait("alien", lambda job: "exceeded quota: none" in jobs.condition(job, "Ready").get("message", ""))
    time.sleep(1.1)  # As above.
    jobs.create("able", replicas=6, pod=on(one, two, three))
    conditions: list[Object] = []

    def tell(job: Object) -> bool:
        conditions.append(job.get("status", {}))
        return True

    jobs.wait("able", lambda job: tell(job) and placed(jobs, "able") == 5)
    began = time.monotonic()
    jobs.wait("able", lambda job: tell(job) and time.monotonic() - began > PATIENCE)
    pods.delete("holder", gracePeriodSeconds=0)
    done = jobs.wait("able", lambda job: tell(job) and jobs.condition(job, "Complete").get("status") == "True")
    assert done["status"].get("rounds", 0) == 1
    assert not any(status.get("internal", {}).get("requeueState", {}).get("count") for status in conditions if status)
    assert "alien" not in json.dumps(conditions)
    message = huge.events("alien", "Requeued")[0]["message"]
    sentence = "only 4 of the 7 required replicas have resources, and more room would not help: all nodes together"
    assert sentence in message
    for each in elsewhere:
        assert jobs.namespace not in json.dumps(each.get("alien")["status"])


def test_what_the_scheduler_says_of_pods_that_no_node_would_take(cluster: LocalCluster, pods: Pods) -> None:
    one, _, _ = cluster.nodes()
    here = {"kubernetes.io/hostname": one}

    def gpus(number: int) -> Object:
        return {"resources": {"limits": {"nvidia.com/gpu": number}}}

    pods.create("holder", STAY, gpus(2), nodeName=one)
    pods.create("no-node", STAY, nodeSelector={"no": "node"})
    pods.create("larger-than-a-node", STAY, gpus(3))
    pods.create("larger-than-its-node", STAY, gpus(3), nodeSelector=here)
    pods.create("behind-another", STAY, gpus(2), nodeSelector=here)

    def view(name: str) -> PodView:
        return pod_view(pods.wait(name, lambda pod: condition(pod, "PodScheduled") == "False")).view

    names = ("no-node", "larger-than-a-node", "larger-than-its-node", "behind-another")
    seen = {name: view(name) for name in names}
    cluster.kubectl("taint", "node", one, "concertina.dev/test=x:NoSchedule")
    try:
        pods.create("tainted", STAY, nodeSelector=here)
        seen["tainted"] = view("tainted")
    finally:
        cluster.kubectl("taint", "node", one, "concertina.dev/test-")
    messages = {name: view.waiting_message for name, view in seen.items()}
    assert {name for name, view in seen.items() if not view.excluded} == {"behind-another"}, messages


@pytest.mark.long(
    law="tests/cluster/operator/rounds/test_growth.py::test_scaling_a_training_job_up_and_down_loses_no_step"
)
def test_the_horizontal_pod_autoscaler_grows_and_shrinks_a_job(jobs: Jobs, tmp_path: Path) -> None:
    jobs.create(
        "a",
        STAY,
        replicas=1,
        elastic={"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}, "standbyReplicas": 1},
    )
    jobs.wait_training("a", 1)
    with metrics.served(jobs.cluster, jobs.namespace, tmp_path) as metric:
        metric.value = 30
        path = f"/apis/autoscaling/v2/namespaces/{jobs.namespace}/horizontalpodautoscalers"
        jobs.cluster.api.call("POST", path, autoscaler(metric.name))
        job = jobs.wait_training("a", 3)
        assert job["status"]["replicas"] == 3
        metric.value = 20
        jobs.wait_training("a", 2)
        assert metric.asked > 0
        # The HPA changes nothing more by itself, because there are as many replicas as it has requested.
        hpa = jobs.cluster.api.call("GET", f"{path}/a")
        assert hpa["status"]["desiredReplicas"] == jobs.get("a")["spec"]["replicas"] == 2


def autoscaler(metric: str) -> Object:
    """Create an HPA with one replica for each ten of the metric, without delay."""
    target = {"type": "AverageValue", "averageValue": "10"}
    return {
        "metadata": {"name": "a"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "name": "a"},
            "minReplicas": 1,
            "maxReplicas": 3,
            "metrics": [{"type": "External", "external": {"metric": {"name": metric}, "target": target}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }


def test_scaling_a_training_job_up_and_down_loses_no_step(jobs: Jobs, data: Path) -> None:
    jobs.create(
        "a", **standing_in(data), replicas=1, elastic={"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}}
    )
    for replicas in (1, 2, 1):
        jobs.patch("a", {"replicas": replicas})
        job = jobs.wait_training("a", replicas)
    assert job["status"].get("stepsReplayed", 0) == 0
    assert job["status"]["restarts"]["total"] == 0
    assert not job["status"]["internal"].get("growth", {}).get("failures")
