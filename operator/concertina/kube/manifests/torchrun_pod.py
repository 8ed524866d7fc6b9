"""torchrun's layer of a pod, and the pod of the store that its agents meet in (`launcher: Torchrun`).

No Service: a member is made when the store's pod has its address, and no member outlives that store. Pure."""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api import TRAINER
from concertina.api.spec import JobSpec
from concertina.kube.manifests.containers import environment, python, storage_access, trainer_of, with_trainer
from concertina.kube.resources import Raw
from concertina.plan.actions import Rendezvous

PORT = protocol.PORT
"""Of the store."""
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
"""Of the members' variables, for the store's: torch may lie in a volume instead of the image (decision "The rendezvous
pod takes the members' volumes")."""
SMALL = {"requests": {"cpu": "100m", "memory": "384Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}


def with_torchrun(pod: Raw, spec: JobSpec, rendezvous: Rendezvous) -> Raw:
    """torchrun's settings in the trainer's environment; nothing else is ours."""
    trainer = trainer_of(pod)
    theirs = {entry["name"]: entry.get("value") or "" for entry in trainer.get("env") or ()}
    changed = {
        "terminationMessagePolicy": "FallbackToLogsOnError",  # nobody else hears its last words
        **trainer,
        "env": environment(trainer, _values(spec, rendezvous, theirs), {"PET_LOCAL_ADDR": "status.podIP"}),
        **storage_access(trainer, spec),
    }
    return with_trainer(pod, changed, restartPolicy=pod["spec"].get("restartPolicy", "Never"))


def _values(spec: JobSpec, rendezvous: Rendezvous, theirs: dict[str, str]) -> dict[str, str]:
    """torchrun's options by their variables; the command line wins over them. The template may tune, not redirect."""
    return {
        "PET_NNODES": f"{rendezvous.least}:{MOST_NODES}" if spec.elastic else str(rendezvous.least),
        "PET_NPROC_PER_NODE": str(spec.workers),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": rendezvous.address,
        "PET_RDZV_ID": f"round-{rendezvous.round}",
        "PET_RDZV_CONF": ",".join(filter(None, (CONFIGURATION, theirs.get("PET_RDZV_CONF")))),  # the last one counts
        "PET_MAX_RESTARTS": theirs.get("PET_MAX_RESTARTS") or RESTARTS,
        # With it torch 2.15 can neither grow nor lose the agent of rank 0.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def store(template: Raw) -> Raw:
    """A small pod of the job's own image and volumes (its torch must be the members'), without GPUs."""
    theirs, trainer = template["spec"], trainer_of(template)
    container: Raw = {
        "name": TRAINER,
        "command": [python(trainer), "-c", SERVE.format(port=PORT).strip()],
        "resources": SMALL,
        "env": [
            {"name": "TMPDIR", "value": "/concertina"},
            {"name": "CUDA_VISIBLE_DEVICES", "value": ""},
            {"name": "CONCERTINA_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *(entry for entry in trainer.get("env") or () if entry["name"] in PATHS),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*(trainer.get("volumeMounts") or ()), {"name": "concertina", "mountPath": "/concertina"}],
        **{field: trainer[field] for field in ("image", "securityContext", "imagePullPolicy") if field in trainer},
    }
    spec = {
        **{field: theirs[field] for field in KEPT_FIELDS if field in theirs},
        "containers": [container],
        "volumes": [*(theirs.get("volumes") or ()), {"name": "concertina", "emptyDir": {}}],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
    }
    return {**template, "spec": spec}
