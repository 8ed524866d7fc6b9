"""Other operators for comparison, the kinds of jobs that they run, and when such a job counts as running."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from concertina.kube.resources import Raw, Resource

RATE = 1000
"""Rate limit of a client in requests per second, and its burst."""
IMAGE, COMMAND = "trainer:bench", ["torchrun", "train.py"]


@dataclass(frozen=True)
class Program:
    """Operator for comparison. All paths are relative to its source folder."""

    name: str
    resources: tuple[str, ...]
    """Paths of the custom resource definitions."""
    webhooks: str
    """Kustomize folder of the webhooks."""
    flags: tuple[str, ...] = ()
    configuration: str = ""
    certificates: str = ""
    """Field of the configuration that enables certificate rotation."""
    objects: tuple[str, ...] = ()
    """Paths of objects to create after the operator has started, because its webhook validates them."""

    def command(self, folder: Path, port: int, work: Path) -> list[str]:
        command = [str(folder / "bin" / self.name), *(flag.format(port=port) for flag in self.flags)]
        if self.configuration:
            configuration = yaml.safe_load((folder / "src" / self.name / self.configuration).read_text()) | {
                "webhook": {"port": port},
                "metrics": {"bindAddress": "0"},
                "health": {"healthProbeBindAddress": "0"},
                "leaderElection": {"leaderElect": False},
                "clientConnection": {"qps": RATE, "burst": RATE},
                self.certificates: {"enable": False},
            }
            (work / f"{self.name}.yaml").write_text(json.dumps(configuration))
            command.append(f"--config={work / self.name}.yaml")
        return command


TRAINING_OPERATOR = Program(
    "training-operator",
    ("manifests/base/crds/kubeflow.org_pytorchjobs.yaml",),
    "manifests/base/webhook",
    flags=(
        "--enable-scheme=pytorchjob",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        "--webhook-server-port={port}",
        f"--kube-api-qps={RATE}",
        f"--kube-api-burst={RATE}",
    ),
)
JOBSET = Program(
    "jobset",
    ("config/components/crd/bases",),
    "config/components/webhook",
    configuration="config/components/manager/controller_manager_config.yaml",
    certificates="internalCertManagement",
)
TRAINER = Program(
    "trainer",
    tuple(
        f"manifests/base/crds/trainer.kubeflow.org_{each}.yaml"
        for each in ("clustertrainingruntimes", "trainingruntimes", "trainjobs")
    ),
    "manifests/base/webhook",
    configuration="manifests/base/manager/controller_manager_config.yaml",
    certificates="certManagement",
    objects=("manifests/base/runtimes/torch_distributed.yaml",),
)


def _pods(container: str) -> Raw:
    return {"containers": [{"name": container, "image": IMAGE, "command": COMMAND}]}


def _pytorch_job(pods: int) -> Raw:
    elastic = {"minReplicas": max(1, pods - 1), "maxReplicas": pods, "rdzvBackend": "c10d"}
    worker = {"replicas": pods, "restartPolicy": "ExitCode", "template": {"spec": _pods("pytorch")}}
    return {"elasticPolicy": elastic, "pytorchReplicaSpecs": {"Worker": worker}}


def _pytorch_job_runs(status: Raw, pods: int) -> bool:
    running = any(
        condition["type"] == "Running" and condition["status"] == "True" for condition in status.get("conditions", ())
    )
    return running and status["replicaStatuses"]["Worker"].get("active") == pods


def _job_set(pods: int) -> Raw:
    template = {"spec": _pods("node") | {"restartPolicy": "Never"}}
    job = {"parallelism": pods, "completions": pods, "backoffLimit": 0, "template": template}
    return {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]}


def _train_job(pods: int) -> Raw:
    trainer = {"numNodes": pods, "image": IMAGE, "command": COMMAND}
    return {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}


def _its_job_is_ready(status: Raw, field: str) -> bool:
    """Return whether a Job is ready. A Job is ready when all of its pods are."""
    return any(job.get("ready") for job in status.get(field, ()))


@dataclass(frozen=True)
class Peer:
    kind: str
    resource: Resource
    programs: tuple[Program, ...]
    spec: Callable[[int], Raw]
    """Function that returns the spec of a job with the given number of pods."""
    runs: Callable[[Raw, int], bool]
    """Function that returns whether a status shows the given number of running pods."""


PEERS = (
    Peer(
        "PyTorchJob",
        Resource("apis/kubeflow.org/v1", "pytorchjobs"),
        (TRAINING_OPERATOR,),
        _pytorch_job,
        _pytorch_job_runs,
    ),
    Peer(
        "JobSet",
        Resource("apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
        (JOBSET,),
        _job_set,
        lambda status, pods: _its_job_is_ready(status, "replicatedJobsStatus"),
    ),
    Peer(
        "TrainJob",
        Resource("apis/trainer.kubeflow.org/v1alpha1", "trainjobs"),
        (JOBSET, TRAINER),
        _train_job,
        lambda status, pods: _its_job_is_ready(status, "jobsStatus"),
    ),
)


def found(folder: Path) -> tuple[Peer, ...]:
    """Return the peers whose programs exist in a folder."""

    def there(program: Program) -> bool:
        return (folder / "bin" / program.name).is_file() and (folder / "src" / program.name).is_dir()

    peers = tuple(peer for peer in PEERS if all(map(there, peer.programs)))
    print(f"peers in {folder}: {', '.join(peer.kind for peer in peers) or 'none'}", flush=True)
    return peers
