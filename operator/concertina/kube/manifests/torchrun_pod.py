"""Manifests for `launcher: Torchrun`: torchrun's settings in members' pods, and the pod of torchrun's TCPStore.

The operator creates a member's pod after the store's pod has an IP address, so no Service is needed. All members end
when the store's pod ends. All functions are pure.
"""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api import TRAINER
from concertina.api.spec import JobSpec
from concertina.kube.manifests.containers import environment, python, storage_access, trainer_of, with_trainer
from concertina.kube.resources import Raw
from concertina.plan.actions import Rendezvous

PORT = protocol.PORT
"""Port on which the store's pod serves torchrun's TCPStore."""
MOST_NODES = 10000
"""Maximum number of nodes in torchrun's settings for an elastic job.

The number is large so that torchrun never refuses replicas that `kubectl scale` adds.
"""
CONFIGURATION = "is_host=0,join_timeout=604800,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Configuration of torchrun's rendezvous (`rdzv_configs`), with times in seconds.

The join timeout is long, because waiting for replicas (for example for quota) is not a failure. A lost replica is
noticed after 3 s instead of 15 s.
"""
RESTARTS = "3"
"""Number of times that torchrun restarts the workers within one rendezvous.

torchrun also counts the loss of another replica as a restart. When all restarts are used, the job's `failurePolicy`
applies.
"""
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
"""Pod fields that the store's pod copies from the template. They determine where the pod may run, and as which user."""
PATHS = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables that the store's pod copies from the template.

They are needed if torch is in a volume and not in the image (decision "The rendezvous pod takes the members' volumes").
"""
SMALL = {"requests": {"cpu": "100m", "memory": "384Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}


def with_torchrun(pod: Raw, spec: JobSpec, rendezvous: Rendezvous) -> Raw:
    """Return the pod's manifest with torchrun's settings in the trainer's environment variables."""
    trainer = trainer_of(pod)
    template_values = {entry["name"]: entry.get("value") or "" for entry in trainer.get("env") or ()}
    changed = {
        "terminationMessagePolicy": "FallbackToLogsOnError",  # nothing else reads the container's last output
        **trainer,
        "env": environment(trainer, _values(spec, rendezvous, template_values), {"PET_LOCAL_ADDR": "status.podIP"}),
        **storage_access(trainer, spec),
    }
    return with_trainer(pod, changed, restartPolicy=pod["spec"].get("restartPolicy", "Never"))


def _values(spec: JobSpec, rendezvous: Rendezvous, template_values: dict[str, str]) -> dict[str, str]:
    """Return torchrun's options as environment variables. Options on torchrun's command line take precedence.

    Variables in the template override some of the options, but not the options of the rendezvous.
    """
    return {
        "PET_NNODES": f"{rendezvous.least}:{MOST_NODES}" if spec.elastic else str(rendezvous.least),
        "PET_NPROC_PER_NODE": str(spec.workers),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": rendezvous.address,
        "PET_RDZV_ID": f"round-{rendezvous.round}",
        # The last value of each option applies.
        "PET_RDZV_CONF": ",".join(filter(None, (CONFIGURATION, template_values.get("PET_RDZV_CONF")))),
        "PET_MAX_RESTARTS": template_values.get("PET_MAX_RESTARTS") or RESTARTS,
        # With a shared store, torch 2.15 can neither grow nor lose the agent of rank 0.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def store(template: Raw) -> Raw:
    """Return a small pod without GPUs that serves torchrun's TCPStore.

    The pod has the job's image and volumes, because it needs the same torch version as the members.
    """
    pod_spec, trainer = template["spec"], trainer_of(template)
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
        **{field: pod_spec[field] for field in KEPT_FIELDS if field in pod_spec},
        "containers": [container],
        "volumes": [*(pod_spec.get("volumes") or ()), {"name": "concertina", "emptyDir": {}}],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
    }
    return {**template, "spec": spec}
