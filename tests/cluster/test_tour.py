"""The tour of `make kind` on the local cluster: all that does not depend on the kind of cluster works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from builders.cluster import tour
from concertina.local.cluster import LocalCluster

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.long(law="tests/cluster/test_chart.py::test_helm_test_finds_the_leader")
def test_a_new_users_way_from_the_chart_to_three_drills(cluster: LocalCluster) -> None:
    settings = {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PYTHONPATH": str(TESTS),
        "CONCERTINA_E2E_NAMESPACE": "tour",
        "CONCERTINA_E2E_LOAD": "echo loads {image}",
        "CONCERTINA_E2E_AGENT_IMAGE": "concertina/agent",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CONCERTINA_E2E_")}
    command = [sys.executable, "-m", "builders.cluster.tour"]
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["loads concertina/operator:0.1.0", "loads concertina/agent:0.1.0"]
    assert lines[-5:] == [
        "demo: complete after 300 steps",
        *(f"drill {scenario}: PASS" for scenario in tour.DRILLS),
        "tour: passed",
    ]
    assert cluster.kubectl("get", "clusterroles", "-o", "name").count("tour-concertina") == 0
