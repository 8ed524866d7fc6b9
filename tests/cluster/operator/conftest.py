"""The operator as a real process with only the chart's service account and permissions, and jobs for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, Operator, install
from concertina.local.cluster import LocalCluster


@pytest.fixture(scope="session")
def installed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the chart without its Deployment, and return the environment of an operator process.

    The process has the permissions of the chart's service account.
    """
    return install(cluster, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def operator(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Run an operator for the tests of a module."""
    running = Operator(tmp_path_factory.mktemp("operator"), installed)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.end(signal.SIGTERM)
    raised = [line for line in running.lines("log") if "traceback" in line]
    assert not raised, raised


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build token shards of a short text."""
    folder = tmp_path_factory.mktemp("data")
    build_data(str(folder), {})
    return folder


@pytest.fixture
def jobs(cluster: LocalCluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace)
