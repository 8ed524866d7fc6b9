"""Pods of `launcher: torchrun`: members, whose command is torchrun itself, and one that serves the store they meet in.

No Service: a member is made when the store's pod has its address, and no member outlives that store. Pure."""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api import TRAINER
from concertina.api.spec import JobSpec
from concertina.kube.manifests import pod_needs
from concertina.kube.manifests.pod import ATTEMPT, DEFAULT_CONTAINER, INDEX, keeping_off, labels, owner, python, spread
from concertina.kube.resources import Raw
from concertina.plan.facts import sizes
from concertina.plan.lifecycle.torchrun import rendezvous_name
from concertina.plan.pods.attempts import pod_name
from concertina.plan.types import CreatePod, CreateRendezvous, JobView

ROUND = "concertina.dev/round"
MOST_NODES = 10000
"""An elastic job's: torchrun must not refuse a replica that `kubectl scale` adds."""
CONFIGURATION = "is_host=0,join_timeout=604800,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Seconds. Waiting for replicas (a quota, a full cluster) is no failure; a lost one is noticed after 3 s, not 15."""
RESTARTS = "3"
"""Of workers, by torchrun, in each rendezvous: it counts a lost peer too. Then failurePolicy decides."""
SERVE = """
import os, signal, socket
from torch.distributed import TCPStore
signal.signal(signal.SIGTERM, lambda *_: exit(0))
host = os.environ["CONCERTINA_POD_IP"]
listening = socket.create_server((host, {port}), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
listening.listen(2048)
store = TCPStore(host, {port}, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
print("torchrun's store listens at", host, {port}, flush=True)
while True:
    signal.pause()
"""
KEPT_FIELDS = (
    "imagePullSecrets", "nodeSelector", "tolerations", "serviceAccountName", "automountServiceAccountToken",
    "securityContext", "priorityClassName", "runtimeClassName", "schedulerName",
)  # fmt: skip
"""Of the template's pod, for the store's: where it may run, and as whom."""
PATHS = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Of the members' variables, for the store's: torch may lie in a volume instead of the image."""
SMALL = {"requests": {"cpu": "100m", "memory": "384Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}


def rendezvous_manifest(job: JobView, spec: JobSpec, create: CreateRendezvous) -> Raw:
    """A small pod of the job's own image and volumes (its torch must be the members'), without GPUs."""
    template = spec.template.manifest()["spec"]
    trainer = next(c for c in template["containers"] if c["name"] == TRAINER)
    script = SERVE.format(port=protocol.PORT).strip()
    container: Raw = {
        "name": TRAINER,
        "image": trainer["image"],
        "command": [python(trainer), "-c", script],
        "resources": SMALL,
        "env": [
            {"name": "TMPDIR", "value": "/concertina"},
            {"name": "CUDA_VISIBLE_DEVICES", "value": ""},
            {"name": "CONCERTINA_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *(entry for entry in trainer.get("env") or () if entry["name"] in PATHS),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*(trainer.get("volumeMounts") or ()), {"name": "concertina", "mountPath": "/concertina"}],
    }
    for field in ("securityContext", "imagePullPolicy"):
        if field in trainer:
            container[field] = trainer[field]
    pod = {
        **{field: template[field] for field in KEPT_FIELDS if field in template},
        "containers": [container],
        "volumes": [*(template.get("volumes") or ()), {"name": "concertina", "emptyDir": {}}],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
    }
    name = rendezvous_name(job.name, create.round)
    own = {ROUND: str(create.round), ATTEMPT: str(create.round)}
    metadata = _metadata(job, spec, name, own, pod_needs.mesh(protocol.PORT))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def member_manifest(job: JobView, spec: JobSpec, create: CreatePod) -> Raw:
    """The template's pod with torchrun's settings in its environment."""
    pod = dict(spec.template.manifest()["spec"])
    trainer = next(c for c in pod["containers"] if c["name"] == TRAINER)
    pod["containers"] = [_trainer(c, pod, spec, create) if c is trainer else c for c in pod["containers"]]
    if volume := pod_needs.shared_memory(pod, trainer):
        pod["volumes"] = [*(pod.get("volumes") or ()), volume]
    pod.setdefault("restartPolicy", "Never")
    pod.setdefault("topologySpreadConstraints", [spread(job)])
    if create.avoid_nodes or create.never_nodes:
        pod["affinity"] = keeping_off(pod.get("affinity") or {}, create)
    own = {INDEX: str(create.index), ATTEMPT: str(create.attempt), ROUND: str(create.round)}
    mesh = pod_needs.mesh(protocol.PORT)
    metadata = _metadata(job, spec, pod_name(job.name, create.index, create.attempt), own, mesh)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _metadata(job: JobView, spec: JobSpec, name: str, own: dict[str, str], annotations: dict[str, str]) -> Raw:
    theirs = spec.template.manifest().get("metadata") or {}
    return {
        "annotations": {DEFAULT_CONTAINER: TRAINER, **annotations, **(theirs.get("annotations") or {})},
        "name": name,
        "labels": {**(theirs.get("labels") or {}), **labels(job), **own},
        "ownerReferences": [owner(job)],
    }


def _trainer(container: Raw, pod: Raw, spec: JobSpec, create: CreatePod) -> Raw:
    theirs = {entry["name"]: entry.get("value") or "" for entry in container.get("env") or ()}
    environment = _environment(spec, create, theirs)
    names = {entry["name"] for entry in environment}
    changed = {**container, "env": [*environment, *(e for e in container.get("env") or () if e["name"] not in names)]}
    changed.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # nobody else hears its last words
    if pod_needs.shared_memory(pod, container):
        mount = {"name": pod_needs.SHM, "mountPath": pod_needs.SHM_PATH}
        changed["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    if spec.checkpoint and spec.checkpoint.secret_name:
        reference = {"secretRef": {"name": spec.checkpoint.secret_name}}
        changed["envFrom"] = [*(container.get("envFrom") or ()), reference]
    return changed


def _environment(spec: JobSpec, create: CreatePod, theirs: dict[str, str]) -> list[Raw]:
    """torchrun's options by their variables; the command line wins over them. The template may tune, not redirect."""
    least = sizes.least(spec)
    configuration = ",".join(filter(None, (CONFIGURATION, theirs.get("PET_RDZV_CONF"))))  # the last one counts
    values = {
        "PET_NNODES": f"{least}:{MOST_NODES}" if spec.elastic else str(least),
        "PET_NPROC_PER_NODE": str(spec.workers),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": create.rendezvous,
        "PET_RDZV_ID": f"round-{create.round}",
        "PET_RDZV_CONF": configuration,
        "PET_MAX_RESTARTS": theirs.get("PET_MAX_RESTARTS") or RESTARTS,
        # With it torch 2.15 can neither grow nor lose the agent of rank 0.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    address = {"name": "PET_LOCAL_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [*({"name": name, "value": value} for name, value in values.items()), address]
