"""JobSet for the comparison in `queues.py`: its real controller next to Kueue's, and a JobSet that trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from builders.cluster.controllers import HOST, Controller
from builders.cluster.queues import Client
from concertina.local.binaries import programs
from concertina.local.host.processes import free_ports

Object = dict[str, Any]
SCRIPT = Path(__file__).parent / "scripts" / "requeued_ddp.py"
FRAMEWORK = "jobset.x-k8s.io/jobset"
"""Name of the JobSet integration in Kueue's configuration."""
JOB_SETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"


class JobSets(Controller):
    """Process of JobSet's controller."""

    def __init__(self, kubeconfig: Path, client: Client, folder: Path) -> None:
        super().__init__(programs.find(programs.JOBSET, print)["jobset"], kubeconfig, client, folder)
        certificates = str(folder / "serving")
        configuration = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": HOST, "port": self.webhook_port, "certDir": certificates},
            "metrics": {"bindAddress": f"{HOST}:{self.metrics_port}", "certDir": certificates},
            "health": {"healthProbeBindAddress": f"{HOST}:{self.health_port}"},
        }
        self.configuration.write_text(yaml.safe_dump(configuration))

    def limit(self, webhook: Object) -> None:
        """Limit the pod webhook to pods of JobSets, as JobSet's own manifests do."""
        if webhook["name"].endswith("pod.kb.io"):
            label = {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
            webhook["objectSelector"] = {"matchExpressions": [label]}


def job_set(
    name: str, labels: Object, workers: int, resources: Object, trace: Path, seconds: float, saves: bool
) -> Object:
    """Return a JobSet whose workers train until they are stopped. Their checkpoint is in the folder `trace`.

    Args:
        name: Name of the JobSet.
        labels: Labels of the JobSet.
        workers: Number of workers.
        resources: Resources of each worker.
        trace: Folder of the trace and of the checkpoint.
        seconds: Seconds between two checkpoints.
        saves: Whether the workers save a checkpoint after SIGTERM.
    """
    command = [sys.executable, str(SCRIPT), "--trace", str(trace), "--checkpoint", str(trace / "model.pt")]
    command += ["--seconds", str(seconds), *(["--save-at-the-end"] if saves else [])]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    env = [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "WORLD_SIZE", "value": str(workers)},
        {"name": "MASTER_ADDR", "value": HOST},  # all nodes of the local cluster share the machine's network
        {"name": "MASTER_PORT", "value": str(free_ports(HOST, 1)[0])},
        {"name": "GLOO_SOCKET_IFNAME", "value": "lo"},
        {"name": "OMP_NUM_THREADS", "value": "1"},
    ]
    container = {
        "name": "trainer",
        "image": "concertina/trainer:bench",
        "command": command,
        "env": env,
        "resources": resources,
    }
    pod = {"restartPolicy": "OnFailure", "containers": [container]}
    job = {
        "parallelism": workers,
        "completions": workers,
        "completionMode": "Indexed",
        "backoffLimit": 1000,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "failurePolicy": {"maxRestarts": 1000},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }
