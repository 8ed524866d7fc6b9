"""A real cluster for the tests of this folder: one for the session, a namespace for each test."""

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
    """A local cluster of three nodes with two simulated GPUs each; it goes down with the session, however that ends."""
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
    """A namespace of the test's own, with its service account; deleted in the background with all that is in it."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.create_namespace(name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def pods(cluster: LocalCluster, namespace: str) -> Pods:
    """Pods of the test's namespace."""
    return Pods(cluster, namespace)
