"""Fixtures of the concertina command, for the tests of this folder."""

import pytest

from builders.cluster.cli import Cli
from concertina.local.cluster import LocalCluster


@pytest.fixture
def cli(cluster: LocalCluster, namespace: str, crd: None) -> Cli:
    return Cli(cluster, namespace)
