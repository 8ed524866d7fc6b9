"""Job in tensor groups on real kubelets: it loses a group, shrinks and grows, and continues as a pipeline.

Planned changes lose no step, and a kill loses a few.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from builders.cluster import drills, e2e
from builders.cluster.e2e import Cluster

pytestmark = [pytest.mark.usefixtures("operator", "data"), pytest.mark.timeout(900)]
NAME = "layouts"
RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}
WIDE = {**drills.TRAINER["model"], "layers": 2, "heads": 4, "kvHeads": 2}
LOST = 5
"""Maximum number of steps that a kill may lose; steps are some tens of milliseconds."""


def patch(cluster: Cluster, **spec: Any) -> None:
    cluster.kubectl("patch", "tj", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


def step(cluster: Cluster) -> int:
    return int(cluster.status(NAME)["progress"]["step"])


def test_tensor_groups_are_lost_and_come_back_and_a_pipeline_goes_on(cluster: Cluster) -> None:
    job = e2e.bundled_job(NAME, e2e.pod(e2e.trainer(resources=RESOURCES)), model=WIDE)
    job["spec"] |= {
        "replicas": 4,
        "parallelism": {"tensor": 2},
        "elastic": {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 1}},
    }
    with cluster.running(job):
        first = cluster.training(4, name=NAME)
        assert first["world"]["layout"] == "shard 2 x tensor 2"

        lost, *others = [member["replica"] for member in first["world"]["members"]]
        cluster.kubectl("delete", "pod", lost, "--grace-period=0", "--force")
        whole = cluster.training(4, above=first["world"]["round"], name=NAME)
        assert {member["replica"] for member in whole["world"]["members"]} >= set(others)
        assert whole["restarts"]["total"] == 1
        assert whole.get("stepsReplayed", 0) <= LOST

        patch(cluster, replicas=2)
        small = cluster.training(2, above=whole["world"]["round"], name=NAME)
        assert small["world"]["layout"] == "tensor 2"

        patch(cluster, suspend=True)
        cluster.until("its suspension", lambda status: e2e.reason(status) == "Suspended", NAME)
        suspended = step(cluster)
        patch(cluster, suspend=False, replicas=4, parallelism={"tensor": 1, "pipeline": 2})
        piped = cluster.training(4, above=small["world"]["round"], name=NAME)
        assert piped["world"]["layout"] == "shard 2 x pipeline 2"
        assert cluster.until("more steps", lambda status: status["progress"]["step"] > suspended + 20, NAME)
        assert cluster.status(NAME).get("stepsReplayed", 0) == whole.get("stepsReplayed", 0), "of what was planned none"


def test_adapters_are_trained_by_groups_within_a_pod_with_their_state_on_the_host(cluster: Cluster) -> None:
    """Each replica has two workers and is a tensor group. The pod of one replica is lost."""
    model = {**WIDE, "lora": {"rank": 4, "targets": ["Query", "Value", "Down"]}}
    job = e2e.bundled_job(
        "adapters", e2e.pod(e2e.trainer(resources=RESOURCES)), model=model, memory={"offload": "State"}
    )
    job["spec"] |= {"workersPerReplica": 2, "parallelism": {"tensor": 2}, "elastic": {"minReplicas": 1}}
    with cluster.running(job):
        first = cluster.training(2, name="adapters")
        assert first["world"]["layout"] == "shard 2 x tensor 2"
        cluster.kubectl("delete", "pod", first["world"]["members"][0]["replica"], "--grace-period=0", "--force")
        whole = cluster.training(2, above=first["world"]["round"], name="adapters")
        assert whole["restarts"]["total"] == 1
        assert whole.get("stepsReplayed", 0) <= LOST


def test_tensor_groups_send_while_they_multiply(cluster: Cluster) -> None:
    job = e2e.bundled_job("overlapped", e2e.pod(e2e.trainer(resources=RESOURCES)), model=WIDE)
    job["spec"] |= {"workersPerReplica": 2, "parallelism": {"tensor": 2, "asyncTensor": True}}
    with cluster.running(job):
        first = cluster.training(2, name="overlapped")
        assert first["world"]["layout"] == "shard 2 x tensor 2"
        cluster.until("steps", lambda status: status["progress"]["step"] > 50, "overlapped")


def test_pods_of_a_tensor_group_come_to_one_node(cluster: Cluster) -> None:
    job = e2e.bundled_job("near", e2e.pod(e2e.trainer(resources=RESOURCES)), model=WIDE)
    job["spec"] |= {"replicas": 4, "parallelism": {"tensor": 2}, "topology": {"labels": ["kubernetes.io/hostname"]}}
    with cluster.running(job):
        world = cluster.training(4, name="near")["world"]
        assert "crossDomainGroups" not in world
        nodes = [member["node"] for member in world["members"]]
        assert nodes[0] == nodes[1]
        assert nodes[2] == nodes[3]
