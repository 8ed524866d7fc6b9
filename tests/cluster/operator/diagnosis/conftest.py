"""Common fixtures of the planted problems: an operator, a namespace, a user's shell, and a Prometheus."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from monitoring.__main__ import RULES

from builders.cluster.operator_process import Jobs, Operator
from builders.cluster.planted import DIVISOR, Alerts
from builders.prometheus import serve, shortened
from concertina.local.cluster import LocalCluster
from concertina.local.host import processes


@pytest.fixture(scope="module")
def metrics() -> str:
    """Return the address of the operator's metrics."""
    [port] = processes.free_ports("127.0.0.1", 1)
    return f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def operator(installed: dict[str, str], metrics: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Run an operator that serves metrics, and whose pods do."""
    running = Operator(tmp_path_factory.mktemp("operator"), installed)
    running.start(CONCERTINA_METRICS=metrics, CONCERTINA_POD_METRICS="9400")
    yield running
    running.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def jobs(cluster: LocalCluster, operator: Operator) -> Iterator[Jobs]:
    """Yield a namespace's jobs for all tests of a file. Runs are concurrent, and pause most of the time."""
    namespace = f"t-{uuid.uuid4().hex[:8]}"
    cluster.create_namespace(namespace)
    yield Jobs(cluster, namespace)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def shell(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the environment of a user whose context is this namespace, with both commands on the path."""
    folder = tmp_path_factory.mktemp("shell")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(jobs.cluster.kubeconfig.read_text())
    commands = (str(Path(sys.executable).parent), str(Path(jobs.cluster.record.kubectl).parent), os.environ["PATH"])
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": os.pathsep.join(commands)}
    subprocess.run(
        ["kubectl", "config", "set-context", "--current", f"--namespace={jobs.namespace}"], env=environment, check=True
    )
    return environment


def scrapes(operator: str, jobs: Jobs) -> list[dict[str, Any]]:
    """Return the targets to scrape: the operator, and all pods with metrics that Kubernetes lists in the namespace."""
    pods = {
        "role": "pod",
        "kubeconfig_file": str(jobs.cluster.kubeconfig),
        "namespaces": {"names": [jobs.namespace]},
    }
    named = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": "agent-metrics", "action": "keep"}
    return [
        {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [operator]}]},
        {"job_name": "pods", "honor_labels": True, "kubernetes_sd_configs": [pods], "relabel_configs": [named]},
    ]


@pytest.fixture(scope="module")
def alerts(jobs: Jobs, metrics: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alerts]:
    """Yield the alerts of a Prometheus with the chart's rules, whose times are shortened."""
    folder = tmp_path_factory.mktemp("prometheus")
    with serve(folder, scrapes(metrics, jobs), shortened(RULES, DIVISOR, folder / "rules.yaml")) as prometheus:
        yield Alerts(prometheus, jobs)
