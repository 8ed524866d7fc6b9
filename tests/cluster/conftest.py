"""Real cluster for the tests of this folder: one for the session, with a namespace for each test."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.cluster.crds import wait_established
from builders.cluster.pods import Pods
from concertina.local import cluster as local
from concertina.local.cluster import LocalCluster
from concertina.local.state import lifetime
from concertina.local.state.record import Options

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Run a local cluster of three nodes with two simulated GPUs each, which always ends with the session."""
    name = f"test-{os.getpid()}"
    with local.owned(name, Options(nodes=3, gpus=2), print) as running:
        yield running
    if request.session.testsfailed:
        print(f"logs of the local cluster: {running.record.logs}")
    else:
        lifetime.forget(name)


@pytest.fixture(scope="module")
def crd(cluster: LocalCluster) -> None:
    """Install the CRD of this checkout."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    wait_established(cluster.api)


@pytest.fixture
def namespace(cluster: LocalCluster) -> Iterator[str]:
    """Create a namespace with its service account for the test; delete it with its content in the background."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.create_namespace(name)
    yield name
    cluster.api.call("DELETE", f"/api/v1/namespaces/{name}", timeout=60.0)


@pytest.fixture
def pods(cluster: LocalCluster, namespace: str) -> Pods:
    """Return the pods of the test's namespace."""
    return Pods(cluster, namespace)
