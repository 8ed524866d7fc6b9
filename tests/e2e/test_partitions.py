"""Partitions by the packet filters of nodes: the right members continue, without a loop of rounds.

`CONCERTINA_E2E_NODE_RUN` is the beginning of a command that runs the rest of it in the network of `{node}`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from builders.cluster import e2e
from builders.cluster.e2e import JOB, Cluster, Object

pytestmark = [pytest.mark.usefixtures("job"), pytest.mark.timeout(900)]
OPERATOR = ("-l", "app.kubernetes.io/name=concertina-operator")
LOOK_FOR_LOOPS = 20.0
"""Seconds within which a job with a loop of rounds would show it."""


def addresses(cluster: Cluster, *selector: str) -> dict[str, str]:
    """Return the IP addresses of the running pods by name."""
    pods = json.loads(cluster.kubectl("get", "pods", *selector, "-o", "json"))["items"]
    return {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in pods if pod["status"]["phase"] == "Running"}


@pytest.fixture(scope="module", autouse=True)
def fresh(cluster: Cluster, job: str) -> None:
    """Recreate the job: after drills in which a new member was lost, growth would wait for minutes."""
    cluster.kubectl("delete", "tj", JOB, "--timeout=120s")
    cluster.apply(e2e.job())
    cluster.training(3)
    uid = cluster.job()["metadata"]["uid"]
    cluster.until("a checkpoint of its own", lambda _: latest()["durable"]["uid"] == uid)


@contextmanager
def cut(node: str, own: str, others: list[str]) -> Iterator[float]:
    """Drop all packets between a pod of the node and these addresses; yield the time in Unix seconds.

    The node's other pods are not affected, because the operator may be one of them.
    """
    pairs = [pair for other in others for pair in ((own, other), (other, own))]
    rules = [("FORWARD", "-s", source, "-d", target, "-j", "DROP") for source, target in pairs]

    def filter_packets(action: str) -> None:
        for chain, *rule in rules:
            e2e.on_node(node, "iptables", "-w", action, chain, *rule)

    at = time.time()
    try:
        filter_packets("-I")
        yield at
    finally:
        filter_packets("-D")


def latest() -> Object:
    """Return what `LATEST` in storage names."""
    from concertina_state.objects.prefix import ObjectPrefix

    value = ObjectPrefix(e2e.job()["spec"]["checkpoint"]["uri"]).get("LATEST")
    assert value is not None
    return dict(json.loads(value))


def settles_without(cluster: Cluster, left_out: str, before: Object) -> Object:
    """Wait for a world of two without that replica, and check the number of rounds."""
    status = cluster.training(2, above=before["world"]["round"])
    assert left_out not in [member["replica"] for member in status["world"]["members"]]
    time.sleep(LOOK_FOR_LOOPS)
    later = cluster.status()
    assert later["world"]["round"] <= status["world"]["round"] + 1, "the job goes from round to round"
    assert later["progress"]["step"] > status["progress"]["step"]
    return later


def healed(cluster: Cluster, before: Object) -> None:
    """Wait for three replicas again, and check that the partition counts for nobody and storage has no older round."""
    published = latest()
    status = cluster.training(3, above=before["world"]["round"])
    assert status["restarts"].get("inWindow", 0) == before["restarts"].get("inWindow", 0)
    after = cluster.until("a newer checkpoint", lambda s: s["lastCheckpoint"]["step"] > published["durable"]["step"])
    assert after["lastCheckpoint"]["round"] >= published["durable"]["round"]


def test_a_member_that_reaches_the_operator_but_no_other_member(cluster: Cluster) -> None:
    before = cluster.training(3)
    world, ips = before["world"], addresses(cluster, "-l", f"concertina.dev/job={JOB}")
    victim = next(member for member in world["members"] if member["replica"] != world["coordinator"])
    others = [ip for name, ip in ips.items() if name != victim["replica"]]
    with cut(victim["node"], ips[victim["replica"]], others):
        settles_without(cluster, victim["replica"], before)
    healed(cluster, before)


def test_a_coordinator_that_reaches_nobody_and_accuses_all(cluster: Cluster) -> None:
    before = cluster.training(3)
    world, ips = before["world"], addresses(cluster, "-l", f"concertina.dev/job={JOB}")
    coordinator = next(member for member in world["members"] if member["replica"] == world["coordinator"])
    others = [ip for name, ip in ips.items() if name != coordinator["replica"]]
    with cut(coordinator["node"], ips[coordinator["replica"]], others):
        settles_without(cluster, coordinator["replica"], before)
        assert latest()["durable"]["uid"] == cluster.job()["metadata"]["uid"]
    healed(cluster, before)


def test_members_that_reach_each_other_but_not_the_operator(cluster: Cluster) -> None:
    """The operator needs nothing from a member other than the coordinator, so the round continues."""
    before = cluster.training(3)
    world = before["world"]
    spared = cluster.kubectl("get", "pods", *OPERATOR, "-o=jsonpath={.items[*].spec.nodeName}").split()
    others = [member for member in world["members"] if member["replica"] != world["coordinator"]]
    victim = next((member for member in others if member["node"] not in spared), others[0])
    own = addresses(cluster, "-l", f"concertina.dev/job={JOB}")[victim["replica"]]
    with cut(victim["node"], own, list(addresses(cluster, *OPERATOR).values())):
        time.sleep(LOOK_FOR_LOOPS)
        status = cluster.status()
        assert status["progress"]["step"] > before["progress"]["step"]
        assert status["world"]["round"] <= world["round"] + 1
    healed_status = cluster.training(3)
    assert healed_status["restarts"].get("inWindow", 0) == before["restarts"].get("inWindow", 0)


LOST = 45.0
"""Seconds after which a silent coordinator is reported."""


def goes_on_unheard(cluster: Cluster, before: Object, coordinator_is_cut: bool) -> None:
    """Check that the same round continues, as its checkpoints show, and that the silence is reported."""
    saved = latest()["durable"]["step"]
    time.sleep(LOST)
    status = cluster.status()
    assert status["world"] == before["world"], "a healthy round was given up"
    assert status["restarts"] == before["restarts"]
    assert latest()["durable"]["step"] > saved
    degraded = next(each for each in status["conditions"] if each["type"] == "Degraded")
    assert (degraded["reason"] == "AgentsUnreachable") == coordinator_is_cut, degraded


@pytest.mark.long(law="tests/e2e/test_partitions.py::test_an_operator_that_reaches_no_agent_on_other_nodes")
def test_a_coordinator_that_the_operator_alone_does_not_reach(cluster: Cluster) -> None:
    before = cluster.training(3)
    coordinator = before["world"]["members"][0]
    own = addresses(cluster, "-l", f"concertina.dev/job={JOB}")[coordinator["replica"]]
    with cut(coordinator["node"], own, list(addresses(cluster, *OPERATOR).values())):
        goes_on_unheard(cluster, before, coordinator_is_cut=True)
    cluster.until("a coordinator that is heard", lambda s: s["progress"]["step"] > before["progress"]["step"] + 1)
    assert cluster.training(3)["world"] == before["world"]


def test_an_operator_that_reaches_no_agent_on_other_nodes(cluster: Cluster) -> None:
    """Traffic between the operator and agents of its own node passes no packet filter."""
    before = cluster.training(3)
    (home,) = cluster.kubectl("get", "pods", *OPERATOR, "-o=jsonpath={.items[*].spec.nodeName}").split()
    (own,) = addresses(cluster, *OPERATOR).values()
    away = {member["replica"] for member in before["world"]["members"] if member["node"] != home}
    agents = addresses(cluster, "-l", f"concertina.dev/job={JOB}")
    with cut(home, own, [ip for name, ip in agents.items() if name in away]):
        goes_on_unheard(cluster, before, coordinator_is_cut=before["world"]["coordinator"] in away)
    cluster.until("a coordinator that is heard", lambda s: s["progress"]["step"] > before["progress"]["step"] + 1)
    assert cluster.training(3)["world"] == before["world"]
