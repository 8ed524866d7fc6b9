"""Where the scheduler puts pods of a layout. The nodes are objects alone: what is bound to them starts nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from builders.cluster.operator import Jobs
from builders.until import until

pytestmark = pytest.mark.usefixtures("operator")
DOMAIN, ZONE, GPU = "example.com/nvlink-domain", "topology.kubernetes.io/zone", "example.com/gpu"
ONLY = "example.com/planned"
"""Of these nodes: no other test's pods come here, and none of ours goes elsewhere."""


@pytest.fixture
def domains(jobs: Jobs) -> Iterator[dict[str, str]]:
    """Of each of 12 nodes for one pod: four domains of three nodes, two to a zone."""
    found = {f"planned-{number}": f"d{number // 3}" for number in range(12)}
    api = jobs.cluster.api
    for number, (name, domain) in enumerate(found.items()):
        named = {DOMAIN: domain, ZONE: f"z{number // 6}", ONLY: "true", "kubernetes.io/hostname": name}
        node = api.call("POST", "/api/v1/nodes", {
            "metadata": {"name": name, "labels": named},
            "spec": {"taints": [{"key": ONLY, "effect": "NoSchedule"}]},
        })  # fmt: skip
        room = {"cpu": "64", "memory": "64Gi", "pods": "9", "ephemeral-storage": "64Gi", GPU: "1"}
        ready = {"type": "Ready", "status": "True", "reason": "Planned", "lastHeartbeatTime": "2036-01-01T00:00:00Z"}
        del node["metadata"]["resourceVersion"]
        node["status"] = {"capacity": room, "allocatable": room, "conditions": [ready]}
        api.call("PUT", f"/api/v1/nodes/{name}/status", node)
    yield found
    for name in found:
        api.call("DELETE", f"/api/v1/nodes/{name}")


def test_pods_of_a_tensor_group_come_into_one_domain_and_a_replacement_to_its_group(
    jobs: Jobs, domains: dict[str, str]
) -> None:
    container = {"name": "trainer", "image": "planned", "command": ["true"], "resources": {"limits": {GPU: "1"}}}
    tolerations = [{"key": ONLY, "operator": "Exists"}]
    jobs.create(
        "laid", replicas=8, parallelism={"tensor": 2, "shard": 2}, topology={"labels": [ZONE, DOMAIN]},
        pod={"containers": [container], "nodeSelector": {ONLY: "true"}, "tolerations": tolerations},
    )  # fmt: skip
    places = until(lambda: placed(jobs, domains, 8), "8 pods that have a node")
    assert together(places) == [1, 1, 1, 1], places
    jobs.cluster.kubectl("delete", "pod", "-n", jobs.namespace, "laid-5-0", "--force", "--grace-period=0")
    places = until(lambda: placed(jobs, domains, 8, without="laid-5-0"), "a replacement that has a node")
    assert together(places) == [1, 1, 1, 1], places


def placed(jobs: Jobs, domains: dict[str, str], count: int, without: str = "") -> dict[int, str]:
    """The domain of each replica's pod, once all have one."""
    pods: list[dict[str, Any]] = jobs.pods("laid")
    found = {
        int(pod["metadata"]["labels"]["concertina.dev/replica-index"]): domains[pod["spec"]["nodeName"]]
        for pod in pods
        if pod["spec"].get("nodeName") and pod["metadata"]["name"] != without
    }
    return found if len(found) == count else {}


def together(places: dict[int, str]) -> list[int]:
    """In how many domains each pair is."""
    return [len({places[at], places[at + 1]}) for at in range(0, len(places), 2)]
