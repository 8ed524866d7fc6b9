"""The operator as a real process, with the chart's service account and permissions and no others; and jobs for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from builders.cluster.drills import build_data
from builders.cluster.operator import Jobs, Operator
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[3]
RELEASE, SYSTEM = "tests", "concertina-tests"


@pytest.fixture(scope="session")
def installed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The chart without its Deployment; the environment of an operator process with the chart's service account."""
    chart = str(ROOT / "charts/concertina")
    options = ("--namespace", SYSTEM, "--create-namespace", "--set", "replicas=0")
    programs.run_helm(cluster.kubeconfig, "install", RELEASE, chart, *options)
    folder = tmp_path_factory.mktemp("installed")
    account = f"{RELEASE}-concertina"
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", account, "-n", SYSTEM, "--duration=24h").strip()
    (user,) = kubeconfig["users"]
    user["user"] = {"token": token}
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # the operator of this checkout, whatever is installed
        "HOME": "/",  # as container runtimes set it for such a user
        "KUBECONFIG": str(folder / "kubeconfig"),
        "CONCERTINA_NAMESPACE": SYSTEM,
        "CONCERTINA_LEASE": f"{account}-operator",
        "CONCERTINA_MASTER_KEY_SECRET": f"{account}-master-key",
        "CONCERTINA_MASTER_KEY_CREATE": "true",
        "CONCERTINA_IMAGE_AGENT": "concertina/agent:test",
        "POD_NAME": "operator-of-the-tests",
    }


@pytest.fixture(scope="module")
def operator(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Runs for a module's tests."""
    running = Operator(tmp_path_factory.mktemp("operator"), installed)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.end(signal.SIGTERM)
    raised = [line for line in running.lines("log") if "traceback" in line]
    assert not raised, raised


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a short text."""
    folder = tmp_path_factory.mktemp("data")
    build_data(str(folder), {})
    return folder


@pytest.fixture
def jobs(cluster: LocalCluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace)
