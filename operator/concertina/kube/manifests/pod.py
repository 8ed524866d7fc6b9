"""Manifests of a job's pods and Secret (table in docs/architecture.md). All functions are pure.

A sequence of functions builds a pod's manifest. Each function takes a manifest and returns a changed manifest: for the
agent or torchrun, shared memory, placement, the pod group, and the operator's metadata. The first manifest is the job's
template. Everything else stays as the user wrote it.
"""

from __future__ import annotations

import hashlib
import json

from concertina.api import TRAINER
from concertina.api.pod_names import pod_name, rendezvous_name
from concertina.api.spec import JobSpec
from concertina.kube.manifests import agent_container, torchrun_pod
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.containers import memory_of, trainer_of, with_trainer
from concertina.kube.manifests.names import (
    ATTEMPT,
    INDEX,
    ROUND,
    TEMPLATE_HASH,
    labels,
    owner,
    secret_name,
)
from concertina.kube.manifests.pod_group import in_pod_group
from concertina.kube.manifests.pod_placement import placed
from concertina.kube.manifests.workload import admitted
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod, CreateRendezvous
from concertina.plan.observed import JobView

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Annotation with the name of the container whose log `kubectl logs` shows by default."""
END_POD = {"activeDeadlineSeconds": 1}
"""Patch of a pod's spec with which the operator stops the pod without deleting it.

The kubelet then stops the containers, whatever the restartPolicy is, and marks the pod as failed.
"""
SHM, SHM_PATH = "concertina-shm", "/dev/shm"
SHM_LEAST = 64 << 20
"""Size of /dev/shm in bytes that containerd and Docker provide by default."""
INTO_PODS = {
    "template", "trainer", "checkpoint", "workers_per_replica", "launcher", "warm_start", "step_detection", "tracking",
    "scheduling",
}  # fmt: skip
"""Fields of a job's spec that the manifests of its pods depend on.

Users can change these fields only while the job is suspended (`api.rules`).
"""
BUNDLED_INTO_PODS = {"parallelism"}
"""Further spec fields that pods of the bundled trainer depend on.

For a script, these fields only affect the number of replicas.
"""


def template_hash(spec: JobSpec) -> str:
    """Return a hash of the spec fields that the manifests of the job's pods depend on.

    Fields with their default value are left out of the hash. A newer version of the operator has more fields with
    defaults, and the hash of a running job's pods must not change with an upgrade (decision "Pods carry a hash of their
    spec").
    """
    field_names = INTO_PODS | BUNDLED_INTO_PODS if spec.bundled else INTO_PODS
    user_fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=field_names)
    return hashlib.sha256(json.dumps(user_fields, sort_keys=True).encode()).hexdigest()[:16]


def pod_manifest(job: JobView, spec: JobSpec, create: CreatePod, settings: PodSettings) -> Raw:
    """Return the manifest of a replica's pod."""
    template = spec.template.manifest()
    number = {INDEX: str(create.index), ATTEMPT: str(create.attempt)}
    if create.rendezvous:
        port, number[ROUND] = torchrun_pod.PORT, str(create.rendezvous.round)
        pod = torchrun_pod.with_torchrun(template, spec, create.rendezvous)
    else:
        port = agent_container.port(job, template, create)
        pod = agent_container.with_agent(template, job, spec, port, settings, create.snapshot_memory)
        metrics_port = agent_container.metrics_port(job, spec, template, create, settings.metrics)
        if settings.metrics is not None and metrics_port is not None:
            pod = agent_container.with_metrics(pod, spec, metrics_port, settings.metrics)
    pod = placed(_with_shared_memory(pod), job, spec, create)
    if create.pod_group is not None:
        pod = in_pod_group(pod, create.pod_group)
    owned = _owned(pod, job, pod_name(job.name, create.index, create.attempt), number, port)
    return admitted(owned, create.quota.changes) if create.quota else owned


def rendezvous_manifest(job: JobView, spec: JobSpec, create: CreateRendezvous) -> Raw:
    """Return the manifest of the pod that serves torchrun's TCPStore, through which the members find each other."""
    number = {ROUND: str(create.round), ATTEMPT: str(create.round)}
    store = torchrun_pod.store(spec.template.manifest())
    if spec.scheduling.gang is not None:
        # The members are created after this pod. A scheduler that groups pods by owner, as KAI does, would wait for
        # them.
        store["spec"].pop("schedulerName", None)
    owned = _owned(store, job, rendezvous_name(job.name, create.round), number, torchrun_pod.PORT)
    return admitted(owned, create.quota.changes) if create.quota else owned


def secret_manifest(job: JobView, data: dict[str, str]) -> Raw:
    """Return the manifest of a job's Secret.

    `data` is the Secret's field of that name, with values in base64.
    """
    metadata = {"name": secret_name(job), "labels": labels(job), "ownerReferences": [owner(job)]}
    kind = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"}
    return {**kind, "metadata": metadata, "data": data, "immutable": True}


def _owned(pod: Raw, job: JobView, name: str, number: dict[str, str], port: int) -> Raw:
    """Return the pod's manifest with the operator's labels, annotations and owner reference.

    Args:
        pod: Manifest of the pod.
        job: Job that owns the pod.
        name: Name of the pod.
        number: Labels for index, attempt and round.
        port: Port of the agent or of torchrun's store.
    """
    template_metadata = pod.get("metadata") or {}
    hash_annotation = {TEMPLATE_HASH: job.template_hash} if job.template_hash else {}
    metadata = {
        "name": name,
        "labels": {**(template_metadata.get("labels") or {}), **labels(job), **number},
        "annotations": {
            DEFAULT_CONTAINER: TRAINER,
            **_no_mesh(port),
            **(template_metadata.get("annotations") or {}),
            **hash_annotation,
        },
        "ownerReferences": [owner(job)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


def _no_mesh(port: int) -> dict[str, str]:
    """Return pod annotations that exclude the job's connections between pods from a service mesh.

    Annotations in the template take precedence. Workers listen on ports that the kernel chooses, and agents use their
    own mutual TLS. A mesh proxy for incoming connections would break the workers' connections, and agents do not need
    it. Requests from the pod to storage and experiment trackers still use the mesh. Without a mesh, the annotations
    have no effect.
    """
    return {
        "traffic.sidecar.istio.io/includeInboundPorts": "",
        "traffic.sidecar.istio.io/excludeOutboundPorts": str(port),
        "config.linkerd.io/skip-inbound-ports": "1-65535",
        "config.linkerd.io/skip-outbound-ports": str(port),
    }


def _with_shared_memory(pod: Raw) -> Raw:
    """Return the pod's manifest with a memory volume for /dev/shm.

    Data loaders, gloo and NCCL need more space than the 64 MiB that container runtimes provide. The volume may use half
    of the container's memory, as on Linux without containers. A process that fills the volume gets "no space left" and
    is not killed. The manifest is unchanged if the template already has such a volume or uses the host's IPC namespace.
    """
    trainer = trainer_of(pod)
    mounts = trainer.get("volumeMounts") or ()
    if pod["spec"].get("hostIPC") or SHM_PATH in {mount["mountPath"].rstrip("/") for mount in mounts}:
        return pod
    source: Raw = {"medium": "Memory"}
    if memory := memory_of(trainer):
        source["sizeLimit"] = str(max(memory // 2, SHM_LEAST))
    volumes = [*(pod["spec"].get("volumes") or ()), {"name": SHM, "emptyDir": source}]
    mounted = {**trainer, "volumeMounts": [*mounts, {"name": SHM, "mountPath": SHM_PATH}]}
    return with_trainer(pod, mounted, volumes=volumes)
