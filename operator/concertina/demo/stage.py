"""Stage of the demo and of the benchmarks: a local cluster, an S3 server, the operator from its chart, and data.

Everything belongs to the process that set it up, and ends with it.
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
    """Running stage: `cluster` with the operator in it, and `storage` with BUCKET in it."""

    cluster: LocalCluster
    storage: s3.Server

    def job(self, name: str, namespace: str = "default") -> dict[str, Any]:
        """Return a TrainingJob as it is now."""
        path = f"/apis/concertina.dev/v1beta1/namespaces/{namespace}/trainingjobs/{name}"
        job: dict[str, Any] = self.cluster.api.call("GET", path)
        return job

    def pods(self, name: str, namespace: str = "default") -> list[dict[str, Any]]:
        """Return the pods of a TrainingJob."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=concertina.dev%2Fjob%3D{name}"
        return list(self.cluster.api.call("GET", path)["items"])

    def operator_node(self) -> str:
        """Return the node on which the operator runs. A drill of a job leaves it alone."""
        pods = self.cluster.api.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
        return str(next(pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running"))


@contextmanager
def standing(name: str, nodes: int, step: Callable[[str], Any]) -> Iterator[Stage]:
    """Set up the stage. Each node has one simulated GPU, so that each replica has a node of its own as in production.

    Args:
        name: Name of the local cluster.
        nodes: Number of nodes.
        step: Context manager around each part of the work. The caller shows the text and measures the time.
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
    """Install charts/concertina, and wait until its Deployment is available."""
    programs.run_helm(
        up.kubeconfig, "install", "concertina", str(CHART),
        "--namespace", SYSTEM, "--create-namespace", *(f"--set={setting}" for setting in settings),
    )  # fmt: skip
    up.kubectl("-n", SYSTEM, "rollout", "status", "deployment/concertina", "--timeout=60s")


def put_secret(up: LocalCluster, storage: s3.Server, namespace: str = "default") -> None:
    """Create the Secret `s3`, which the examples name in checkpoint.secretName."""
    literals = [f"--from-literal={key}={value}" for key, value in storage.environment().items()]
    up.kubectl("-n", namespace, "create", "secret", "generic", "s3", *literals)


def build_data(storage: s3.Server) -> Iterator[tuple[int, int]]:
    """Build token shards of the bytes of `text`, in the folder `data` of the bucket.

    Yields the number of bytes done and the number of all bytes.
    """
    from concertina_trainer.data.build.build import build

    os.environ.update(storage.environment())
    with tempfile.TemporaryDirectory() as folder:
        for progress in build(text.write(Path(folder), TEXT_FILES, TEXT_BYTES // TEXT_FILES), f"s3://{BUCKET}/data"):
            yield progress.done, progress.total
