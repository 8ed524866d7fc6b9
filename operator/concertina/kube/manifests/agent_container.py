"""Add the agent to a pod's manifest: an init container, two volumes, and a command that starts the agent.

The init container installs the agent. In the container `trainer`, the agent starts the user's command. All functions
are pure.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina.api.quantity_fields import amounts_of
from concertina.api.spec import JobSpec, Parallelism
from concertina.kube.manifests.containers import (
    environment,
    python,
    storage_access,
    trainer_of,
    with_trainer,
)
from concertina.kube.manifests.names import METRICS_PORT_NAME, PORT_NAME, secret_name
from concertina.kube.manifests.recorded import recorded
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod
from concertina.plan.observed import JobView

VOLUME, VOLUME_PATH = "concertina", "/concertina"
IDENTITY, IDENTITY_PATH = "concertina-identity", "/etc/concertina"
HOST_PORTS = range(13000, 20000)
"""Ports of agents in pods that use the host's network.

They are below the node ports of Services (30000), below the ports that Linux uses for outgoing connections (32768), and
below the ports on which workers meet (20000, `concertina_agent.transfers.store`).
"""
METRICS_HOST_PORTS = range(12000, 13000)
"""Ports on which agents serve metrics in pods that use the host's network."""
METRICS_TOKEN = "CONCERTINA_METRICS_TOKEN"
SCRAPED = "prometheus.io/"
"""Prefix of the pod annotations with which Prometheus chooses the pods to scrape."""
USER = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions", "seccompProfile", "appArmorProfile")
CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


@dataclass(frozen=True)
class AgentMetrics:
    """Settings of the endpoint on which each agent serves metrics."""

    port: int
    annotated: bool = False
    """True if pods get annotations with which Prometheus finds them."""
    token_secret: str = ""
    """Name of a Secret in the namespace of each job. Clients must present the token in its entry `token`.

    If the name is empty, clients need no token.
    """


class PullPolicy(enum.Enum):
    """Values of a container's imagePullPolicy."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


@dataclass(frozen=True)
class PodSettings:
    """Operator settings that the manifests of pods depend on, such as the agent's image."""

    agent_image: str
    metrics: AgentMetrics | None = None
    """Settings of the agents' metrics endpoint; None if agents serve no metrics."""
    agent_pull_policy: PullPolicy | None = None


def port(job: JobView, template: Raw, create: CreatePod) -> int:
    """Return the TCP port on which the pod's agent listens.

    In the host's network, the port depends on the job, the replica index and the attempt. Replicas of one job therefore
    have different ports, and replicas of different jobs rarely have the same port. The port is declared as a host port,
    so the scheduler puts two pods with the same port on different nodes (decision "Agent ports in the host network").
    If a process outside of pods already uses the port, the agent reports this and exits. The pod of the next attempt
    gets a different port.
    """
    if not template["spec"].get("hostNetwork"):
        return protocol.PORT
    return _host_port(HOST_PORTS, job, create)


def _host_port(ports: range, job: JobView, create: CreatePod) -> int:
    start = int(job.uid.replace("-", "")[:8], 16)
    return ports[(start + create.index + 1009 * create.attempt) % len(ports)]


def metrics_port(
    job: JobView, spec: JobSpec, template: Raw, create: CreatePod, metrics: AgentMetrics | None
) -> int | None:
    """Return the port on which the pod's agent serves metrics.

    The result is None if agents serve no metrics, or if a container of the pod template declares this port itself.
    """
    if metrics is None or not spec.metrics.enabled:
        return None
    if template["spec"].get("hostNetwork"):
        return _host_port(METRICS_HOST_PORTS, job, create)
    containers = [*template["spec"]["containers"], *(template["spec"].get("initContainers") or ())]
    template_ports = {port.get("containerPort") for container in containers for port in container.get("ports") or ()}
    return None if metrics.port in template_ports else metrics.port


def with_metrics(pod: Raw, spec: JobSpec, port: int, metrics: AgentMetrics) -> Raw:
    """Return the pod's manifest, changed so that the pod's agent serves metrics on the given port."""
    trainer, metadata = trainer_of(pod), pod.get("metadata") or {}
    declared: Raw = {"name": METRICS_PORT_NAME, "containerPort": port, "protocol": "TCP"}
    if pod["spec"].get("hostNetwork"):
        declared["hostPort"] = port
    settings = {"port": port, "perRank": spec.metrics.per_rank, "token": bool(metrics.token_secret)}
    variables = environment(trainer, {"CONCERTINA_METRICS": json.dumps(settings)}, {})
    variables = [variable for variable in variables if variable["name"] != METRICS_TOKEN]
    if metrics.token_secret:
        # The Secret is optional: without it, the agent refuses all requests, and training continues.
        key = {"name": metrics.token_secret, "key": "token", "optional": True}
        variables.append({"name": METRICS_TOKEN, "valueFrom": {"secretKeyRef": key}})
    changed = {**trainer, "env": variables, "ports": [*(trainer.get("ports") or ()), declared]}
    annotations = metadata.get("annotations") or {}
    if metrics.annotated and not any(key.startswith(SCRAPED) for key in annotations):
        scrape_annotations = {f"{SCRAPED}scrape": "true", f"{SCRAPED}port": str(port), f"{SCRAPED}path": "/metrics"}
        metadata = {**metadata, "annotations": {**scrape_annotations, **annotations}}
    return with_trainer({**pod, "metadata": metadata}, changed)


def with_agent(
    pod: Raw, job: JobView, spec: JobSpec, port: int, settings: PodSettings, snapshot_memory: int | None
) -> Raw:
    """Return the pod's manifest with the agent added."""
    pod_spec, trainer = pod["spec"], trainer_of(pod)
    command = [*(trainer.get("command") or ()), *(trainer.get("args") or ())]
    declared: Raw = {"name": PORT_NAME, "containerPort": port, "protocol": "TCP"}
    if pod_spec.get("hostNetwork"):
        declared["hostPort"] = port  # so that the scheduler reserves the port
    memory: Raw = {"medium": "Memory"} if spec.bundled else {}
    if spec.bundled and snapshot_memory is not None:
        # Snapshots count as the container's memory. With a size limit, writers get "no space left" instead of an OOM
        # kill.
        memory["sizeLimit"] = str(snapshot_memory)
    changed = {
        **{key: value for key, value in trainer.items() if key != "args"},
        "command": [
            *(python(trainer), f"{VOLUME_PATH}/agent.pyz", "run"),
            *(["--bundled"] if spec.bundled else ["--", *command]),
        ],
        "env": environment(trainer, _values(job, spec, port), FIELDS),
        **storage_access(trainer, spec),
        "ports": [*(trainer.get("ports") or ()), declared],
        "volumeMounts": [
            *(trainer.get("volumeMounts") or ()),
            {"name": VOLUME, "mountPath": VOLUME_PATH},
            {"name": IDENTITY, "mountPath": IDENTITY_PATH, "readOnly": True},
        ],
    }
    layer = {
        "initContainers": [_installer(trainer, settings, spec), *(pod_spec.get("initContainers") or ())],
        "volumes": [
            *(pod_spec.get("volumes") or ()),
            {"name": VOLUME, "emptyDir": memory},
            {"name": IDENTITY, "secret": {"secretName": secret_name(job)}},
        ],
        # If a container fails with its agent, it is restarted with the same volume (decision "Containers restart within
        # their pod").
        "restartPolicy": pod_spec.get("restartPolicy", "OnFailure"),
    }
    return with_trainer(pod, changed, **layer)


def _installer(trainer: Raw, settings: PodSettings, spec: JobSpec) -> Raw:
    """Return the init container that copies the agent into the pod.

    The init container has the trainer's resources, because a resource quota may require them. It has the trainer's user
    and no privileges, so that any policy that admits the trainer also admits the init container.
    """
    security_context = trainer.get("securityContext") or {}
    container: Raw = {
        "name": "concertina-agent",
        "image": settings.agent_image,
        # The bundled trainer has its own storage client, and its volume is memory reserved for snapshots.
        "command": ["concertina-agent", "install", *([] if spec.bundled else ["--storage-client"]), VOLUME_PATH],
        "volumeMounts": [{"name": VOLUME, "mountPath": VOLUME_PATH}],
        "securityContext": {**{key: security_context[key] for key in USER if key in security_context}, **CONFINED},
    }
    if settings.agent_pull_policy is not None:
        container["imagePullPolicy"] = settings.agent_pull_policy.value
    resources = {
        kind: {name: amount for name, amount in amounts_of(trainer, kind).items() if name in ("cpu", "memory")}
        for kind in ("limits", "requests")
        if amounts_of(trainer, kind)
    }
    if any(resources.values()):
        container["resources"] = resources
    return container


def _values(job: JobView, spec: JobSpec, port: int) -> dict[str, str]:
    # Fields that are not set are left out, because an image of another version may not know them.
    config = spec.trainer.model_dump_json(by_alias=True, exclude_none=True) if spec.trainer else "{}"
    checkpoint = spec.checkpoint.model_dump_json(by_alias=True) if spec.checkpoint else "null"
    tracking = spec.tracking.model_dump_json(by_alias=True, exclude_none=True) if spec.tracking else ""
    optional_values = {"CONCERTINA_TRACKING": tracking.replace("$", "$$")} if tracking else {}
    if spec.bundled and spec.parallelism != Parallelism():
        optional_values["CONCERTINA_PARALLELISM"] = spec.parallelism.model_dump_json(by_alias=True, exclude_none=True)
    if spec.bundled:
        optional_values["CONCERTINA_LEAST_RANKS"] = str(spec.least_replicas * spec.workers)
    if not spec.bundled and not spec.step_detection.enabled:
        optional_values["CONCERTINA_STEP_DETECTION"] = "false"
    if not spec.failure_policy.gpu_preflight:
        optional_values["CONCERTINA_PREFLIGHT"] = "false"
    if not spec.requests_devices:
        optional_values["CONCERTINA_PREFLIGHT"] = "none"
    return {
        **optional_values,
        "CONCERTINA_JOB": f"{job.namespace}/{job.name}",
        "CONCERTINA_UID": job.uid,
        "CONCERTINA_PORT": str(port),
        "CONCERTINA_WORKERS": str(spec.workers),
        "CONCERTINA_GRACE_SECONDS": str(spec.template.manifest()["spec"].get("terminationGracePeriodSeconds", 30)),
        "CONCERTINA_IMAGE": spec.template.trainer.image or "",
        # Escape $, because Kubernetes would expand $(NAME) in these values.
        "CONCERTINA_TRAINER": config.replace("$", "$$"),
        "CONCERTINA_CHECKPOINT": checkpoint.replace("$", "$$"),
        "CONCERTINA_SPEC": recorded(spec).replace("$", "$$"),
        "CONCERTINA_WARM_START": "null" if spec.bundled else spec.warm_start.model_dump_json(by_alias=True),
    }


FIELDS = {
    "CONCERTINA_REPLICA": "metadata.name",
    "CONCERTINA_POD_IP": "status.podIP",
    "CONCERTINA_NODE": "spec.nodeName",
}
