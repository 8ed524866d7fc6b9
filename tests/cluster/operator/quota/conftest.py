"""Fixtures of the real Kueue beside the operator, and of queues for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.cluster.controllers import serving
from builders.cluster.kueue import Kueue
from builders.cluster.operator_process import Jobs
from builders.cluster.queued import QueuedJobs
from builders.cluster.queues import Client
from builders.cluster.quota_use import QuotaUse
from concertina.local.cluster import LocalCluster


@pytest.fixture(scope="module")
def kueue(cluster: LocalCluster, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    """Run Kueue for the tests of a module."""
    with serving(Kueue(cluster.kubeconfig, client, tmp_path_factory.mktemp("kueue"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Client:
    return Client.of_local(cluster)


@pytest.fixture
def queued(kueue: Kueue, client: Client, jobs: Jobs, data: Path) -> Iterator[QueuedJobs]:
    """Yield jobs of the test's namespace with queues of the same name, and check that no quota is used twice."""
    use = QuotaUse(client)
    with use.recording():
        jobs_with_queues = QueuedJobs(jobs, client, data)
        yield jobs_with_queues
        jobs_with_queues.remove_all()
    assert not (breaches := use.breaches([jobs.namespace], jobs_with_queues.quota)), breaches[:10]
