"""The operator and one long-lived job in a namespace of a cluster that is given by KUBECONFIG; see docs/e2e.md."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from builders.cluster import drills, e2e, images
from builders.cluster.e2e import Cluster
from builders.otlp import Receiver, receiver
from concertina_state.objects.prefix import ObjectPrefix

TOKEN = "metrics"
"""Name of a Secret."""


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Return the cluster, with everything that the tests must not create themselves."""
    kubeconfig = os.environ.get("KUBECONFIG", "")
    if not e2e.setting("RUN") or not kubeconfig:
        pytest.skip("end-to-end tests need a cluster: `KUBECONFIG=... make test-e2e` (docs/e2e.md says the rest)")
    reached = Cluster(kubeconfig)
    account = f"system:serviceaccount:{e2e.NAMESPACE}:concertina"
    wanted = {
        "the CRD": reached.kubectl("get", "crd", "trainingjobs.concertina.dev", check=False),
        f"the namespace {e2e.NAMESPACE}": reached.kubectl("get", "namespace", e2e.NAMESPACE, check=False),
        "the right to read nodes": reached.kubectl("auth", "can-i", "list", "nodes", f"--as={account}", check=False),
    }
    missing = [name for name, answer in wanted.items() if not answer]
    if missing:
        pytest.skip(
            f"the cluster lacks {', '.join(missing)}: `make e2e-prerequisites | kubectl apply --server-side -f -`"
        )
    lost = [name for name in e2e.STORAGE[:2] if not os.environ.get(name)]
    if lost:
        pytest.skip(f"the job needs storage: set {', '.join(lost)} and AWS_ENDPOINT_URL of an S3 server")
    own = [f"{e2e.IMAGE}:{e2e.TAG}", f"{e2e.AGENT_IMAGE}:{e2e.TAG}", e2e.TRAINER_IMAGE]
    images.load([*own, *filter(None, map(e2e.setting, e2e.MORE_IMAGES))])
    return reached


@pytest.fixture(scope="session")
def collector() -> Iterator[Receiver | None]:
    """Run a collector of the operator's traces on this machine; None if pods can't reach it."""
    host = e2e.setting("HOST")
    if not host:
        yield None
        return
    with receiver(host=host) as there:
        yield there


@pytest.fixture(scope="session")
def token() -> str:
    """Return the token that operator and pods require for their metrics."""
    return secrets.token_hex(16)


@pytest.fixture(scope="session")
def operator(cluster: Cluster, collector: Receiver | None, token: str) -> Iterator[None]:
    """Install the operator from its chart, with traces and tokens for metrics; delete everything afterwards."""
    values = [f"metrics.tokenSecret={TOKEN}", f"metrics.pods.tokenSecret={TOKEN}"]
    values += [f"tracing.endpoint={collector.endpoint}"] if collector else []
    objects = [each for each in e2e.chart(*values) if each["kind"] not in e2e.CLUSTER_WIDE]
    storage = {name: os.environ[name] for name in e2e.STORAGE if name in os.environ}
    secrets = [secret("s3", storage), secret(TOKEN, {"token": token})]
    cluster.apply(*secrets, *objects)
    try:
        cluster.kubectl("rollout", "status", "deployment/concertina", "--timeout=120s")
        yield
        if log := e2e.setting("OPERATOR_LOG"):
            with open(log, "w") as file:
                file.write(cluster.kubectl("logs", "deployment/concertina", check=False))
    finally:
        for each in reversed([*secrets, *objects]):
            cluster.kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", "secret", "concertina-master-key", "--ignore-not-found")


def secret(name: str, entries: dict[str, str]) -> e2e.Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": entries}


@pytest.fixture(scope="session")
def data(cluster: Cluster) -> None:
    """Put token shards of a short text into storage, in place of those of an earlier session."""
    before = ObjectPrefix(e2e.DATA)
    before.delete(list(before.list("")))
    drills.build_data(e2e.DATA, {})


@pytest.fixture(scope="session")
def job(cluster: Cluster, operator: None, data: None) -> Iterator[str]:
    """Yield the job's name, as soon as all of it trains and has a checkpoint."""
    cluster.apply(e2e.job())
    try:
        cluster.training(3)
        cluster.until("a checkpoint", lambda status: status.get("lastCheckpoint"))
        yield e2e.JOB
    finally:
        cluster.kubectl("delete", "tj", e2e.JOB, "--ignore-not-found", "--timeout=60s", check=False)


@pytest.fixture
def play(request: pytest.FixtureRequest) -> Callable[[str, str], Any]:
    """Return a function that runs a scenario on a job with the real command and returns its verdict.

    It skips scenarios that need a command that is not configured.
    """

    def play(scenario: str, job: str) -> Any:
        commands = e2e.operator_commands() | dict(os.environ)
        done = drills.drill(scenario, "--yes", "-o", "json", "-n", e2e.NAMESPACE, job=job, **commands)
        if "CONCERTINA_DRILL_" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        return drills.verdict(done, request.config)

    return play


@pytest.fixture
def drill(play: Callable[[str, str], Any], job: str) -> Callable[[str], Any]:
    """Return a function like `play` for the shared job."""
    return lambda scenario: play(scenario, job)
