"""Distance of snapshots' copies, on a real control plane: the zones are labels of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.cluster.operator_process import Jobs, standing_in

pytestmark = pytest.mark.usefixtures("operator")
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture
def zones(jobs: Jobs) -> Iterator[dict[str, str]]:
    """Label the nodes with zones: the first node has a zone for itself, the others share one."""
    kubectl = jobs.cluster.kubectl
    nodes = sorted(kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split())
    zones = {node: "a" if node == nodes[0] else "b" for node in nodes}
    for node, zone in zones.items():
        kubectl("label", "node", node, f"{ZONE}={zone}")
    yield zones
    for node in nodes:
        kubectl("label", "node", node, f"{ZONE}-")


@pytest.mark.long(law="tests/unit/plan/state/test_copy_distance.py::test_a_zone_with_too_many_is_told")
def test_copies_within_a_zone_are_told(jobs: Jobs, data: Path, zones: dict[str, str]) -> None:
    """Three replicas run on a node each."""
    one_a_node = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    alike = {"labelSelector": {"matchLabels": {"concertina.dev/job": "a"}}}
    jobs.create("a", replicas=3, **standing_in(data, topologySpreadConstraints=[{**one_a_node, **alike}]))
    world = jobs.wait_training("a", 3)["status"]["world"]
    assert {member["node"] for member in world["members"]} == set(zones)
    assert world["copies"] == "Node", "two of three are in one zone: one of them copies from the other"
    (event,) = jobs.events("a", "CopiesShareZone")
    assert event["message"].startswith("1 of 3 replicas have the copy of their snapshots in the same zone")
