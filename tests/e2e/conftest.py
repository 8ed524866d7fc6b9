"""The operator and one long-lived job in a namespace of a cluster that is given by KUBECONFIG; see docs/drills.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from builders import e2e
from builders.e2e import Cluster


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster, where all is there that the tests must not make themselves."""
    kubeconfig = os.environ.get("KUBECONFIG", "")
    if not e2e.setting("RUN") or not kubeconfig:
        pytest.skip("end-to-end tests need a cluster: `KUBECONFIG=... make test-e2e` (docs/drills.md says the rest)")
    found = Cluster(kubeconfig)
    account = f"system:serviceaccount:{e2e.NAMESPACE}:concertina"
    wanted = {
        "the CRD": found.kubectl("get", "crd", "trainingjobs.concertina.dev", check=False),
        f"the namespace {e2e.NAMESPACE}": found.kubectl("get", "namespace", e2e.NAMESPACE, check=False),
        "the right to read nodes": found.kubectl("auth", "can-i", "list", "nodes", f"--as={account}", check=False),
    }
    missing = [name for name, answer in wanted.items() if not answer]
    if missing:
        pytest.skip(
            f"the cluster lacks {', '.join(missing)}: `make e2e-prerequisites | kubectl apply --server-side -f -`"
        )
    lost = [name for name in e2e.STORAGE[:2] if not os.environ.get(name)]
    if lost:
        pytest.skip(f"the job needs storage: set {', '.join(lost)} and AWS_ENDPOINT_URL of an S3 server")
    return found


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[None]:
    """From its chart; all of it is deleted afterwards."""
    objects = [each for each in e2e.chart() if each["kind"] not in e2e.CLUSTER_WIDE]
    storage = {name: os.environ[name] for name in e2e.STORAGE if name in os.environ}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": storage}
    cluster.apply(*objects, secret)
    try:
        cluster.kubectl("rollout", "status", "deployment/concertina", "--timeout=120s")
        yield
        if log := e2e.setting("OPERATOR_LOG"):
            with open(log, "w") as file:
                file.write(cluster.kubectl("logs", "deployment/concertina", check=False))
    finally:
        for each in reversed([*objects, secret]):
            cluster.kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def job(cluster: Cluster, operator: None) -> Iterator[str]:
    """The job's name, as soon as all of it trains and has a checkpoint."""
    build = [sys.executable, "-m", "concertina_trainer.cli", "data", "build", "--out", f"s3://{e2e.BUCKET}/data"]
    subprocess.run([*build, __file__, e2e.__file__], check=True, capture_output=True, timeout=120)
    cluster.apply(e2e.job())
    try:
        cluster.training(3)
        cluster.until("a checkpoint", lambda status: status.get("lastCheckpoint"))
        yield e2e.JOB
    finally:
        cluster.kubectl("delete", "tj", e2e.JOB, "--ignore-not-found", "--timeout=60s", check=False)


@pytest.fixture
def drill(cluster: Cluster, job: str) -> Callable[[str], Any]:
    """Plays a scenario with the real command; the verdict that it prints as JSON. Skips what needs a command."""

    def play(scenario: str) -> Any:
        words = ["drill", job, "--scenario", scenario, "--yes", "-o", "json", "-n", e2e.NAMESPACE]
        command = [sys.executable, "-m", "concertina.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
        if "CONCERTINA_DRILL_" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.stdout, done.stderr
        verdict = json.loads(done.stdout)
        assert done.returncode == (0 if verdict["passed"] else 1)
        print(json.dumps(verdict, indent=1))
        return verdict

    return play
