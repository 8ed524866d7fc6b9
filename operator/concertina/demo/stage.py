"""Setup for the demo and the benchmarks: a local cluster, an S3 server, the operator from its chart, and data.

The setup belongs to the process that creates it, and ends with that process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concertina.demo import text
from concertina.local import cluster, s3
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.state.record import Options

CHECKOUT = Path(__file__).resolve().parents[3]
CHART = CHECKOUT / "charts" / "concertina"
SYSTEM = "concertina-system"
BUCKET = "demo"
TEXT_FILES, TEXT_BYTES = 60, 6_000_000
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """Running setup: the cluster `cluster` with the operator, and the S3 server `storage` with the bucket BUCKET."""

    cluster: LocalCluster
    storage: s3.Server

    def job(self, name: str, namespace: str = "default") -> dict[str, Any]:
        """Return the current TrainingJob object from the API server."""
        path = f"/apis/concertina.dev/v1beta1/namespaces/{namespace}/trainingjobs/{name}"
        job: dict[str, Any] = self.cluster.api.call("GET", path)
        return job

    def pods(self, name: str, namespace: str = "default") -> list[dict[str, Any]]:
        """Return the pods of a TrainingJob."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=concertina.dev%2Fjob%3D{name}"
        return list(self.cluster.api.call("GET", path)["items"])

    def operator_node(self) -> str:
        """Return the node on which the operator runs.

        The demo and the benchmarks must not make this node fail.
        """
        pods = self.cluster.api.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
        return str(next(pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running"))


@contextmanager
def standing(name: str, nodes: int, step: Callable[[str], Any]) -> Iterator[Stage]:
    """Start the setup, and remove it when the block ends.

    Each node has one simulated GPU, so each replica runs on a node of its own, as in production.

    Args:
        name: Name of the local cluster.
        nodes: Number of nodes.
        step: Function that returns a context manager for one part of the work. Its argument describes the part.
    """
    with ExitStack() as stack:
        with step("control plane and nodes") as say:
            up = stack.enter_context(cluster.owned(name, Options(nodes=nodes, gpus=1), say))
        with step("S3 server"):
            storage = stack.enter_context(s3.running(up.directory / "s3", [BUCKET]))
        with step("operator, by helm"):
            install_operator(up)
        put_secret(up, storage)
        yield Stage(up, storage)


def install_operator(up: LocalCluster, *settings: str) -> None:
    """Install the chart charts/concertina, and wait until the operator's Deployment is available."""
    programs.run_helm(
        up.kubeconfig, "install", "concertina", str(CHART),
        "--namespace", SYSTEM, "--create-namespace", *(f"--set={setting}" for setting in settings),
    )  # fmt: skip
    up.kubectl("-n", SYSTEM, "rollout", "status", "deployment/concertina", "--timeout=60s")


def put_secret(up: LocalCluster, storage: s3.Server, namespace: str = "default") -> None:
    """Create the Secret `s3`, which the examples name in checkpoint.secretName, with the S3 server's credentials."""
    literals = [f"--from-literal={key}={value}" for key, value in storage.environment().items()]
    up.kubectl("-n", namespace, "create", "secret", "generic", "s3", *literals)


def build_data(storage: s3.Server) -> Iterator[tuple[int, int]]:
    """Tokenise the files of `text` into token shards in the folder `data` of the bucket.

    Tokens are bytes. Yield the number of bytes done and the total number of bytes.
    """
    from concertina_trainer.data.build.build import build

    os.environ.update(storage.environment())
    with tempfile.TemporaryDirectory() as folder:
        for progress in build(text.write(Path(folder), TEXT_FILES, TEXT_BYTES // TEXT_FILES), f"s3://{BUCKET}/data"):
            yield progress.done, progress.total
