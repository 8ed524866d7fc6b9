"""Ports of the control plane: no pod takes them, and a component that is restarted waits for its own."""

import socket
import sys
import threading
from pathlib import Path

import pytest

from builders.until import until
from concertina.kube.manifests.agent_container import HOST_PORTS, METRICS_HOST_PORTS
from concertina.local import cluster as local
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane import components
from concertina.local.errors import LocalClusterError
from concertina.local.host import processes
from concertina.local.state.record import ClusterRecord, Options

ADDRESS = "127.251.0.1"
LISTENS = """
import socket, sys, time
from pathlib import Path
with socket.create_server((sys.argv[1], int(sys.argv[2]))):
    Path(sys.argv[3]).touch()
    time.sleep(600)
"""


def test_agents_in_the_hosts_network_never_listen_at_a_port_of_a_cluster() -> None:
    assert not {*processes._PORTS} & {*HOST_PORTS, *METRICS_HOST_PORTS}


def restarted(folder: Path, port: int) -> LocalCluster:
    """Return a cluster whose API server is a program that ends if it can't listen at its port."""
    endpoints = components.Endpoints(ADDRESS, port, 2, 3)
    components.write_files(folder, endpoints)
    command = [sys.executable, "-c", LISTENS, ADDRESS, str(port), str(folder / "listens")]
    return LocalCluster(ClusterRecord("ports", folder, endpoints, {"kube-apiserver": command}, Options(), "kubectl"))


@pytest.mark.parametrize("address", [ADDRESS, "0.0.0.0"])
def test_a_component_is_started_once_its_port_is_free(tmp_path: Path, address: str) -> None:
    holder = socket.create_server((address, 0))
    cluster = restarted(tmp_path, holder.getsockname()[1])
    release = threading.Timer(0.5, holder.close)
    release.start()
    try:
        cluster.start_component("kube-apiserver")
        until(lambda: (tmp_path / "listens").exists(), "a component that listens")
    finally:
        release.join()
        processes.kill(processes.marked(tmp_path))


def test_a_port_that_another_program_keeps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PORT_TIMEOUT", 0.1)
    with socket.create_server((ADDRESS, 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(LocalClusterError, match=f"another program listens at {ADDRESS}:{port}"):
            restarted(tmp_path, port).start_component("kube-apiserver")
    assert not processes.marked(tmp_path)
