"""Ports of nodes: a port is free although another kubelet runs, and a kubelet that can't listen reports that."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from concertina.local import nodes
from concertina.local.control_plane import components
from concertina.local.host import processes
from concertina.local.state.record import ClusterRecord, Options

KUBELET = """
import socket, sys
from pathlib import Path
from concertina.local.node import kubelet
link, _runtime = socket.socketpair()
kubelet.main(Path(sys.argv[1]), link)
"""


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    """Return the record of a cluster at whose network nothing listens."""
    endpoints = components.Endpoints("127.251.0.1", 1, 2, 3)
    components.write_files(tmp_path, endpoints)
    return ClusterRecord("nodes", tmp_path, endpoints, {}, Options(), "kubectl")


def listening(folder: Path) -> tuple[str, int]:
    config = json.loads((folder / "node.json").read_text())
    return config["address"], config["port"]


def test_a_node_listens_where_no_other_kubelet_of_the_machine_does(
    record: ClusterRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:  # A kubelet listens on all addresses of the machine.
        taken = other.getsockname()[1]
        monkeypatch.setattr(processes, "_PORTS", range(taken, taken + 5))
        chosen = {listening(nodes.define(record, 1)) for _ in range(20)}
    assert all(taken < port < taken + 5 for _, port in chosen)


def test_a_kubelet_that_cannot_listen_says_why(record: ClusterRecord) -> None:
    folder = nodes.define(record, 1)
    with socket.create_server(listening(folder)):
        command = [sys.executable, "-c", KUBELET, str(folder)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "address already in use" in ended.stderr
    assert ended.returncode == 1
