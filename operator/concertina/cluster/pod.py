"""The objects that the operator makes for a job, its Secret and its Pods (table in docs/architecture.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from concertina.api import API_VERSION, KIND, TRAINER
from concertina.api.spec import JobSpec
from concertina.cluster.resources import Raw
from concertina.plan.types import CreatePod, JobView
from concertina_agent import protocol

TRAINER_CONTAINER = TRAINER
JOB = "concertina.dev/job"
JOB_UID = "concertina.dev/job-uid"
INDEX = "concertina.dev/replica-index"
ATTEMPT = "concertina.dev/attempt"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Whose output `kubectl logs` shows, whatever else is in the pod."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "concertina"}
SELECTOR = "app.kubernetes.io/managed-by=concertina"
"""Of all pods that this operator made."""

VOLUME = "concertina"
VOLUME_PATH = "/concertina"
IDENTITY = "concertina-identity"
IDENTITY_PATH = "/etc/concertina"
AVOIDS = "concertina.dev/avoids"
"""Annotation: the nodes that the pod must not run on, by a rule of ours (not of the template)."""
INIT_CONTAINER = "concertina-agent"
AGENT = ("python3", f"{VOLUME_PATH}/agent.pyz", "run")


@dataclass(frozen=True)
class Images:
    agent: str


def pod_name(job: str, index: int, attempt: int) -> str:
    return f"{job}-{index}-{attempt}"


def secret_name(job: JobView) -> str:
    """Of the job's identity. With a part of the uid: a job created again under its name can't find the old one's."""
    return f"{job.name}-concertina-{job.uid[:8]}"


def owner(job: JobView) -> Raw:
    return {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}


def labels(job: JobView) -> dict[str, str]:
    return {**MANAGED_BY, JOB: job.name[:63].rstrip("-."), JOB_UID: job.uid}


def secret_manifest(job: JobView, data: dict[str, str]) -> Raw:
    """`data` is base64 already."""
    metadata = {"name": secret_name(job), "labels": labels(job), "ownerReferences": [owner(job)]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata,
        "data": data,
        "immutable": True,
    }


def pod_manifest(job: JobView, spec: JobSpec, create: CreatePod, images: Images) -> Raw:
    """The template's pod with the agent put in; everything else is left as the user wrote it."""
    template = spec.template.manifest()
    metadata, pod = dict(template.get("metadata") or {}), dict(template["spec"])
    name = pod_name(job.name, create.index, create.attempt)
    identity = {**labels(job), INDEX: str(create.index), ATTEMPT: str(create.attempt)}
    metadata = {
        "annotations": {DEFAULT_CONTAINER: TRAINER, **(metadata.get("annotations") or {})},
        "name": name,
        "labels": {**(metadata.get("labels") or {}), **identity},
        "ownerReferences": [owner(job)],
    }
    trainer = next(c for c in pod["containers"] if c["name"] == TRAINER)
    pod["containers"] = [_trainer(c, job, spec) if c is trainer else c for c in pod["containers"]]
    pod["initContainers"] = [_installer(trainer, images), *(pod.get("initContainers") or ())]
    pod["volumes"] = [*(pod.get("volumes") or ()), *_volumes(job, spec)]
    pod.setdefault("restartPolicy", "Never")
    pod.setdefault("topologySpreadConstraints", [_spread(job)])
    if create.avoid_nodes or create.never_nodes:
        pod["affinity"] = _keeping_off(pod.get("affinity") or {}, create)
    if create.never_nodes:
        metadata["annotations"][AVOIDS] = ",".join(create.never_nodes)
    if create.spare:
        pod["affinity"] = _apart(pod.get("affinity") or {}, job)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _trainer(container: Raw, job: JobView, spec: JobSpec) -> Raw:
    own = [*(container.get("command") or ()), *(container.get("args") or ())]
    command = [*AGENT, "--bundled"] if spec.bundled else [*AGENT, "--", *own]
    environment = _environment(job, spec)
    names = {entry["name"] for entry in environment}
    env_from = list(container.get("envFrom") or ())
    if spec.checkpoint and spec.checkpoint.secret_name:
        env_from.append({"secretRef": {"name": spec.checkpoint.secret_name}})
    changed = {
        **{key: value for key, value in container.items() if key != "args"},
        "command": command,
        "env": [*environment, *(e for e in container.get("env") or () if e["name"] not in names)],
        "volumeMounts": [
            *(container.get("volumeMounts") or ()),
            {"name": VOLUME, "mountPath": VOLUME_PATH},
            {"name": IDENTITY, "mountPath": IDENTITY_PATH, "readOnly": True},
        ],
    }
    return {**changed, "envFrom": env_from} if env_from else changed


def _environment(job: JobView, spec: JobSpec) -> list[Raw]:
    config = spec.trainer.model_dump_json(by_alias=True) if spec.trainer else "{}"
    checkpoint = spec.checkpoint.model_dump_json(by_alias=True) if spec.checkpoint else "null"
    values = {
        "CONCERTINA_JOB": f"{job.namespace}/{job.name}",
        "CONCERTINA_UID": job.uid,
        "CONCERTINA_PORT": str(protocol.PORT),
        "CONCERTINA_WORKERS": str(spec.workers),
        "CONCERTINA_GRACE_SECONDS": str(spec.template.manifest()["spec"].get("terminationGracePeriodSeconds", 30)),
        # Kubernetes would expand $(NAME) in them.
        "CONCERTINA_TRAINER": config.replace("$", "$$"),
        "CONCERTINA_CHECKPOINT": checkpoint.replace("$", "$$"),
    }
    fields = {
        "CONCERTINA_REPLICA": "metadata.name",
        "CONCERTINA_POD_IP": "status.podIP",
        "CONCERTINA_NODE": "spec.nodeName",
    }
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def _installer(trainer: Raw, images: Images) -> Raw:
    """Copies the agent into the pod. With the trainer's resources and security: what admits one admits both."""
    container: Raw = {
        "name": INIT_CONTAINER,
        "image": images.agent,
        "command": ["concertina-agent", "install", VOLUME_PATH],
        "volumeMounts": [{"name": VOLUME, "mountPath": VOLUME_PATH}],
    }
    if trainer.get("securityContext"):
        container["securityContext"] = trainer["securityContext"]
    resources = {
        kind: {name: amount for name, amount in (amounts or {}).items() if name in ("cpu", "memory")}
        for kind, amounts in (trainer.get("resources") or {}).items()
        if kind in ("requests", "limits")
    }
    if any(resources.values()):
        container["resources"] = resources
    return container


def _volumes(job: JobView, spec: JobSpec) -> list[Raw]:
    # Without a sizeLimit the kubelet's is the memory that the pod's containers may use, which snapshots count towards.
    memory: Raw = {"medium": "Memory"} if spec.bundled else {}
    return [
        {"name": VOLUME, "emptyDir": memory},
        {"name": IDENTITY, "secret": {"secretName": secret_name(job)}},
    ]


def _spread(job: JobView) -> Raw:
    """Replicas on different nodes where possible: copies of snapshots are for the death of a node."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {JOB_UID: job.uid}},
    }


def _apart(affinity: Raw, job: JobView) -> Raw:
    """A wish: what takes a member's node shall not take its spare too."""
    term = {"labelSelector": {"matchLabels": {JOB_UID: job.uid}}, "topologyKey": "kubernetes.io/hostname"}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    of_pods = dict(affinity.get("podAntiAffinity") or {})
    of_pods[key] = [*(of_pods.get(key) or ()), {"weight": 100, "podAffinityTerm": term}]
    return {**affinity, "podAntiAffinity": of_pods}


def _keeping_off(affinity: Raw, create: CreatePod) -> Raw:
    """By a wish where the job can't spare the node, by a rule where it can; beside what the template asks for."""
    of_nodes = dict(affinity.get("nodeAffinity") or {})
    if create.avoid_nodes:
        wish = {"weight": 100, "preference": {"matchFields": _not_on(create.avoid_nodes)}}
        key = "preferredDuringSchedulingIgnoredDuringExecution"
        of_nodes[key] = [*(of_nodes.get(key) or ()), wish]
    if create.never_nodes:
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = (of_nodes.get(key) or {}).get("nodeSelectorTerms") or [{}]  # one of them has to hold
        rule = _not_on(create.never_nodes)
        terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *rule]} for term in terms]
        of_nodes[key] = {"nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": of_nodes}


def _not_on(nodes: tuple[str, ...]) -> list[Raw]:
    # a field selector takes one value only
    return [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
