"""Start and end of clusters: twice in a row, side by side, by command, and without remains however the owner ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.until import until
from concertina.local import cluster as local
from concertina.local.cluster import LocalCluster
from concertina.local.errors import LocalClusterError
from concertina.local.host import processes
from concertina.local.state import lifetime
from concertina.local.state import record as state
from concertina.local.state.record import Options

ONE_NODE = Options(nodes=1)
OWNER = """
import sys, time
from concertina.local import cluster
from concertina.local.state.record import Options
with cluster.owned(sys.argv[1], Options(nodes=1, s3=True)) as up:
    up.kubectl("run", "a", "--image=concertina/agent", "--command", "--", "sh", "-c", "setsid sleep 6543 & sleep 6543")
    up.kubectl("wait", "pod/a", "--for=condition=Ready", "--timeout=60s")
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def name() -> Iterator[str]:
    """Yield the name of a cluster that is down before and after the test."""
    chosen = f"life-{os.getpid()}"
    yield chosen
    local.down(chosen)
    lifetime.forget(chosen)


def concertina(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from concertina.cli.local import app; app()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def traces(folder: Path) -> list[str]:
    """Return what is left of a cluster besides its logs."""
    left = [path.name for path in folder.iterdir() if path.name != "logs"] if folder.exists() else []
    return left + [str(process.pid) for process in processes.marked(folder)]


@pytest.mark.long(law="tests/cluster/local/test_lifetime.py::test_a_cluster_goes_down_with_its_owner[9]")
def test_commands_bring_a_cluster_up_and_down_twice(name: str) -> None:
    folder = state.directory(name)
    for _ in range(2):
        first = concertina("up", "--nodes", "1", "--name", name)
        assert first.returncode == 0, first.stderr
        assert f"export KUBECONFIG={folder}/kubeconfig" in first.stdout
        assert f"logs: {folder}/logs" in first.stdout
        before = local.attach(name).running()
        assert concertina("up", "--nodes", "1", "--name", name).returncode == 0  # nothing to do
        assert local.attach(name).running() == before
        assert concertina("status", "--name", name).returncode == 0
        assert concertina("kubeconfig", "--name", name).stdout.strip() == f"{folder}/kubeconfig"
        assert "Ready" in concertina("node", "list", "--name", name).stdout
        assert concertina("down", "--name", name).returncode == 0
        assert traces(folder) == []
    assert concertina("down", "--name", name).returncode == 0
    gone = concertina("status", "--name", name)
    assert gone.returncode == 1
    assert gone.stderr.strip() == f"there is no local cluster {name}: start it with `concertina local up`."


@pytest.mark.long(law="tests/cluster/local/test_lifetime.py::test_a_cluster_goes_down_with_its_owner[9]")
def test_what_is_left_of_a_broken_cluster_is_cleaned_up_by_the_next(name: str) -> None:
    broken = local.up(name, ONE_NODE)
    with pytest.raises(LocalClusterError, match="is up with other options"):
        local.up(name, Options(nodes=2))
    broken.kill_component("etcd")
    mended = local.up(name, ONE_NODE)
    assert all(mended.running().values())
    with pytest.raises(LocalClusterError, match="is up already"), local.owned(name, ONE_NODE):
        pass
    assert all(mended.running().values()), "who may not have it takes nothing down"
    assert "node-1" in mended.kubectl("get", "nodes")


@pytest.mark.long(law="tests/cluster/local/test_lifetime.py::test_a_cluster_goes_down_with_its_owner")
def test_two_clusters_side_by_side(name: str, cluster: LocalCluster) -> None:
    with local.owned(name, ONE_NODE) as second:
        assert second.record.endpoints.address != cluster.record.endpoints.address
        with pytest.raises(LocalClusterError, match="belongs to another running command"), local.owned(name, ONE_NODE):
            pass
        for each in (second, cluster):
            each.create_namespace("side-by-side")
        second.kubectl("delete", "namespace", "side-by-side")
        assert cluster.api.exists("/api/v1/namespaces/side-by-side")
        cluster.kubectl("delete", "namespace", "side-by-side", "--wait=false")
    assert traces(second.directory) == []
    assert all(cluster.running().values())


ENDS = "tests/cluster/local/test_lifetime.py::test_a_cluster_goes_down_with_its_owner[9]"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long(law=ENDS))])
def test_a_cluster_goes_down_with_its_owner(name: str, number: signal.Signals) -> None:
    folder = state.directory(name)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert owner.stdout
        assert owner.stdout.readline() == "up\n"
        node = local.attach(name).running()["node-1"]
        assert node
        tree = [processes.ProcessIdentity.of(pid) for pid in processes.descendants(node.pid)]
        assert (
            len(tree) == 5
        )  # Process 1, the kubelet, the pod's shell and its children, one of which is in another session.
        os.kill(owner.pid, number)
        owner.wait(timeout=60)
    finally:
        owner.kill()
        owner.wait()
    until(lambda: traces(folder) == [], "the end of all traces", lambda: traces(folder))
    until(lambda: not any(each.alive() for each in tree if each), "the end of all its processes")


def test_an_exception_takes_the_cluster_down_half_way_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: LocalCluster) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalCluster, "wait_api", interrupted)
    with pytest.raises(KeyboardInterrupt), local.owned(name, ONE_NODE):
        pass
    assert traces(state.directory(name)) == []
