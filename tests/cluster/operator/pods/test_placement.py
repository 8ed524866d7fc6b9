"""Placement of a layout's pods by the scheduler. The nodes are only objects: their pods do not start."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs
from builders.until import until
from concertina.local.control_plane.api import Api

pytestmark = pytest.mark.usefixtures("operator")
DOMAIN, ZONE, GPU = "example.com/nvlink-domain", "topology.kubernetes.io/zone", "example.com/gpu"
ONLY = "example.com/planned"
"""Label and taint of these nodes: no other test's pods come here, and none of these tests' pods goes elsewhere."""
TAINT = {"key": ONLY, "effect": "NoSchedule"}


@pytest.fixture(params=[1])
def domains(jobs: Jobs, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Yield the domain of each of 12 nodes: four domains of three nodes, two in each zone.

    Each node has room for one pod, or for as many as the parameter says.
    """
    # Each test has nodes with names of its own: without a kubelet, deleted pods of the previous test stay on their
    # nodes for a while.
    domain_by_node = {f"{jobs.namespace}-{number}": f"d{number // 3}" for number in range(12)}
    api = jobs.cluster.api
    nodes = []
    for number, (name, domain) in enumerate(domain_by_node.items()):
        named = {DOMAIN: domain, ZONE: f"z{number // 6}", ONLY: "true", "kubernetes.io/hostname": name}
        node = api.call("POST", "/api/v1/nodes", {
            "metadata": {"name": name, "labels": named},
            "spec": {"taints": [TAINT]},
        })  # fmt: skip
        del node["metadata"]["resourceVersion"]
        nodes.append(node)
    over = threading.Event()
    beats = threading.Thread(target=keep_ready, args=(api, nodes, request.param, over))
    beats.start()
    until(lambda: all(api.call("GET", f"/api/v1/nodes/{name}")["spec"]["taints"] == [TAINT] for name in domain_by_node),
          "all nodes ready")  # fmt: skip
    yield domain_by_node
    over.set()
    beats.join()
    for name in domain_by_node:
        api.call("DELETE", f"/api/v1/nodes/{name}")


def keep_ready(api: Api, nodes: list[dict[str, Any]], gpus: int, over: threading.Event) -> None:
    """Report the nodes as a kubelet does, because the cluster takes a node that is silent for 8 s for lost."""
    room = {"cpu": "64", "memory": "64Gi", "pods": "9", "ephemeral-storage": "64Gi", GPU: str(gpus)}
    while not over.is_set():
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Planned", "lastHeartbeatTime": stamp}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        for node in nodes:
            api.call("PUT", f"/api/v1/nodes/{node['metadata']['name']}/status", {**node, "status": status})
        over.wait(1)


def pod() -> dict[str, Any]:
    """Return a pod that runs on planned nodes only, one for each GPU."""
    resources = {"limits": {GPU: "1"}, "requests": {"cpu": "8", "memory": "8Gi"}}
    container = {"name": "trainer", "image": "planned", "command": ["true"], "resources": resources}
    return {"containers": [container], "nodeSelector": {ONLY: "true"}, "tolerations": [{"operator": "Exists"}]}


def create(jobs: Jobs, *labels: str) -> None:
    """Create eight replicas in pairs, with these labels as domains."""
    jobs.create("laid", replicas=8, parallelism={"tensor": 2, "shard": 2}, topology={"labels": list(labels)}, pod=pod())


def test_pods_of_a_tensor_group_come_into_one_domain_and_a_replacement_to_its_group(
    jobs: Jobs, domains: dict[str, str]
) -> None:
    create(jobs, ZONE, DOMAIN)
    places = until(lambda: placed(jobs, domains, 8), "8 pods that have a node")
    assert together(places) == [1, 1, 1, 1], places
    [taken] = (pod["metadata"]["uid"] for pod in jobs.pods("laid") if pod["metadata"]["name"] == "laid-5-0")
    jobs.cluster.kubectl("delete", "pod", "-n", jobs.namespace, "laid-5-0", "--force", "--grace-period=0")
    places = until(lambda: placed(jobs, domains, 8, without=taken), "a replacement that has a node")
    assert together(places) == [1, 1, 1, 1], places


@pytest.mark.parametrize("domains", [4], indirect=True)
def test_pairs_that_ask_for_a_node_have_one_each(jobs: Jobs, domains: dict[str, str]) -> None:
    """There are enough free nodes for each pod to be alone."""
    create(jobs, "kubernetes.io/hostname")
    places = until(lambda: placed(jobs, {name: name for name in domains}, 8), "8 pods that have a node")
    assert together(places) == [1, 1, 1, 1], places
    assert len(set(places.values())) == 4, places


def placed(jobs: Jobs, domains: dict[str, str], count: int, without: str = "") -> dict[int, str]:
    """Return the domain of each replica's pod, once all have one."""
    pods: list[dict[str, Any]] = jobs.pods("laid")
    nodes = {
        int(pod["metadata"]["labels"]["concertina.dev/replica-index"]): domains[pod["spec"]["nodeName"]]
        for pod in pods
        if pod["spec"].get("nodeName") and pod["metadata"]["uid"] != without
    }
    return nodes if len(nodes) == count else {}


def together(places: dict[int, str]) -> list[int]:
    """Return in how many domains each pair is."""
    return [len({places[at], places[at + 1]}) for at in range(0, len(places), 2)]


@pytest.mark.parametrize(("mode", "with_a_node"), [("Required", 3), ("Preferred", 4)])
def test_all_replicas_are_in_one_domain_as_far_as_they_fit(
    jobs: Jobs, domains: dict[str, str], mode: str, with_a_node: int
) -> None:
    """Four replicas ask for a domain that has three nodes.

    The requirement leaves one pending, the preference does not.
    """
    topology = {"key": DOMAIN, "mode": mode}
    jobs.create("laid", replicas=4, elastic={"minReplicas": 2}, scheduling={"topology": topology}, pod=pod())

    def settled() -> bool:
        pods = jobs.pods("laid")
        refused = [item for item in pods if not has_node(item) and is_refused(item)]
        return len(pods) == 4 and len(refused) == 4 - with_a_node == sum(not has_node(item) for item in pods)

    until(settled, f"{with_a_node} of four pods with a node", lambda: jobs.pods("laid"))
    places = placed(jobs, domains, with_a_node)
    assert sorted(Counter(places.values()).values()) == ([3] if mode == "Required" else [1, 3]), places


def has_node(item: dict[str, Any]) -> bool:
    return bool(item["spec"].get("nodeName"))


def is_refused(item: dict[str, Any]) -> bool:
    """Return whether the scheduler has found no node for the pod."""
    conditions = item["status"].get("conditions", ())
    return any(condition.get("reason") == "Unschedulable" for condition in conditions)
