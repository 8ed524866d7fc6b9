"""Operations on nodes of the local cluster, and on the components of its control plane."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.cluster.pods import Pods, condition, state, status_of
from builders.until import until
from concertina.local.cluster import LocalCluster
from concertina.local.errors import LocalClusterError
from concertina.local.host import processes

SLEEP = "import time; time.sleep(600)"
# Start a grandchild in a session of its own, like a daemon that outlives its parent.
DAEMON = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # {mark}"], start_new_session=True)
print("ready")
time.sleep(600)
"""


def with_mark(mark: str) -> list[int]:
    """Return the processes of this machine that have the mark in their command line."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    pids.append(int(entry))
    return pids


def node_condition(cluster: LocalCluster, name: str) -> str:
    conditions = cluster.api.call("GET", f"/api/v1/nodes/{name}")["status"]["conditions"]
    return next(str(each["status"]) for each in conditions if each["type"] == "Ready")


@pytest.fixture
def node(cluster: LocalCluster) -> Iterator[str]:
    """Yield a node that a test may disturb, and repair it afterwards."""
    name = cluster.nodes()[-1]
    yield name
    with contextlib.suppress(LocalClusterError):
        cluster.cont_node(name)
    cluster.start_node(name)
    cluster.uncordon_node(name)
    cluster.wait_nodes([name])


def test_nodes_are_registered_as_a_kubelet_does(cluster: LocalCluster) -> None:
    items = cluster.api.call("GET", "/api/v1/nodes")["items"]
    assert [item["metadata"]["name"] for item in items] == cluster.nodes()
    addresses = set()
    for item in items:
        status = item["status"]
        assert status["allocatable"]["nvidia.com/gpu"] == "2"
        assert status["allocatable"]["cpu"] == str(os.cpu_count())
        assert item["metadata"]["labels"]["kubernetes.io/hostname"] == item["metadata"]["name"]
        addresses |= {each["address"] for each in status["addresses"] if each["type"] == "InternalIP"}
    assert len(addresses) == len(items)


def test_a_killed_node_dies_with_everything_on_it_and_nobody_is_told(pods: Pods, node: str) -> None:
    mark = f"mark-{pods.namespace}"
    pods.create("a", DAEMON.replace("{mark}", mark), nodeName=node, restartPolicy="Always")
    pods.create("never", SLEEP, nodeName=node)
    pods.wait("a", lambda pod: "ready" in pods.logs("a") if condition(pod, "Ready") == "True" else False)
    pods.wait_phase("never", "Running")
    until(lambda: len(with_mark(mark)) == 2, "both processes", lambda: with_mark(mark))
    pods.cluster.kill_node(node)
    assert with_mark(mark) == []
    assert pods.get("a")["status"]["phase"] == "Running"
    assert condition(pods.get("a"), "Ready") == "True"
    until(lambda: node_condition(pods.cluster, node) == "Unknown", "a node that is not heard of")
    with pytest.raises(LocalClusterError, match="is down: boot it with"):
        pods.cluster.kill_node(node)
    # After its boot, the node does what a kubelet does after a reboot.
    pods.cluster.start_node(node)
    pods.cluster.wait_nodes([node])
    lost = pods.wait_phase("never", "Failed")
    assert state(lost)["terminated"]["exitCode"] == 255
    again = pods.wait("a", lambda pod: status_of(pod)["restartCount"] == 1 and condition(pod, "Ready") == "True")
    assert status_of(again)["lastState"]["terminated"]["exitCode"] == 255


@pytest.mark.long(
    law="tests/cluster/local/test_nodes.py::test_a_killed_node_dies_with_everything_on_it_and_nobody_is_told"
)
def test_a_stopped_node_falls_silent_and_wakes_up(pods: Pods, node: str) -> None:
    pods.create("a", "import time\nwhile True: print(time.time()); time.sleep(0.05)", nodeName=node)
    pods.wait("a", lambda pod: condition(pod, "Ready") == "True")
    pods.cluster.stop_node(node)
    until(lambda: node_condition(pods.cluster, node) == "Unknown", "a node that is not heard of")
    # The node lifecycle controller sets the condition a little later, not the node.
    pods.wait("a", lambda pod: condition(pod, "Ready") == "False")
    stopped = time.time()
    pods.cluster.cont_node(node)
    pods.cluster.wait_nodes([node])
    pods.wait("a", lambda pod: condition(pod, "Ready") == "True")
    pods.wait("a", lambda _: float(pods.logs("a", "--tail=1")) > stopped)
    assert status_of(pods.get("a"))["restartCount"] == 0


def test_drain_evicts_and_cordons(pods: Pods, node: str) -> None:
    pods.create("a", SLEEP, nodeName=node)
    pods.wait_phase("a", "Running")
    pods.cluster.drain_node(node)
    assert not pods.cluster.api.exists(f"{pods.path}/a")
    assert pods.cluster.api.call("GET", f"/api/v1/nodes/{node}")["spec"]["unschedulable"] is True


def test_a_taint_evicts_what_does_not_tolerate_it(pods: Pods, node: str) -> None:
    pods.create("a", SLEEP, nodeName=node)
    toleration = {"key": "spot", "operator": "Exists"}
    pods.create("b", SLEEP, nodeName=node, tolerations=[toleration])
    for name in ("a", "b"):
        pods.wait_phase(name, "Running")
    pods.cluster.taint_node(node, "spot=soon:NoExecute")
    pods.wait_gone("a")
    assert pods.get("b")["status"]["phase"] == "Running"
    pods.cluster.taint_node(node, "spot:NoExecute-")
    assert "spot" not in str(pods.cluster.api.call("GET", f"/api/v1/nodes/{node}")["spec"])


def test_a_node_that_can_make_no_folder_for_a_pod_tries_again(pods: Pods, node: str) -> None:
    folder = pods.cluster.directory / "nodes" / node / "pods"
    pods.run("before", "", nodeName=node)
    folder.rename(folder.with_name("aside"))
    folder.write_text("a file")
    try:
        pods.create("a", "print('at last')", nodeName=node)
        pod = pods.wait("a", lambda pod: "Not a directory" in str(status_of(pod)))
        assert state(pod)["waiting"]["reason"] == "ContainerCreating"
    finally:
        folder.unlink()
        folder.with_name("aside").rename(folder)
    pods.wait_phase("a", "Succeeded")


@pytest.mark.parametrize("name", ["node-9", "", "../nodes"])
def test_a_node_that_is_not_there(cluster: LocalCluster, name: str) -> None:
    with pytest.raises(LocalClusterError, match=f'has no node "{name}"; it has: node-1, node-2, node-3'):
        cluster.kill_node(name)


@pytest.mark.long(law="tests/cluster/operator/recovery/test_faults.py::test_an_api_server_that_is_restarted")
def test_pods_outlive_the_api_server(pods: Pods) -> None:
    pods.create("a", SLEEP)
    pods.wait("a", lambda pod: condition(pod, "Ready") == "True")
    pods.cluster.kill_component("kube-apiserver")
    with pytest.raises(ConnectionError):
        pods.get("a")
    pods.cluster.start_component("kube-apiserver")
    pods.cluster.wait_api()
    pod = pods.get("a")
    assert condition(pod, "Ready") == "True"
    assert status_of(pod)["restartCount"] == 0
    pods.create("b", "print('after')")
    pods.wait_phase("b", "Succeeded")
    pods.delete("a")
    pods.wait_gone("a")


@pytest.mark.parametrize("which", [0, 1])
def test_a_node_ends_with_its_first_process_and_with_its_kubelet(cluster: LocalCluster, node: str, which: int) -> None:
    first = cluster.running()[node]
    assert first
    tree = processes.descendants(first.pid)
    assert tree[0] == first.pid
    assert len(tree) >= 2
    os.kill(tree[which], signal.SIGKILL)
    until(lambda: not any(processes.ProcessIdentity.of(pid) for pid in tree), "the end of all its processes")
