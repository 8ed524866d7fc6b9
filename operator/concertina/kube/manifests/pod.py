"""The objects that the operator makes for a job, its Secret and its Pods (table in docs/architecture.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from concertina.api import API_VERSION, KIND, TRAINER
from concertina.api.spec import JobSpec
from concertina.kube.manifests import pod_needs
from concertina.kube.resources import Raw
from concertina.plan.pods.attempts import pod_name
from concertina.plan.state.snapshot_memory import share
from concertina.plan.types import CreatePod, JobView

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
END_POD = {"activeDeadlineSeconds": 1}
"""Of a pod's spec: its kubelet stops the containers, whatever restartPolicy says, and calls the pod failed."""
AVOIDS = "concertina.dev/avoids"
"""Annotation: the nodes that the pod must not run on, by a rule of ours (not of the template)."""
INIT_CONTAINER = "concertina-agent"
AGENT = (f"{VOLUME_PATH}/agent.pyz", "run")
PYTHON = "CONCERTINA_PYTHON"
"""A variable of the template's container: the Python that runs the agent, where that is not python3 on the PATH."""


@dataclass(frozen=True)
class Images:
    agent: str


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
    port = pod_needs.port(job, pod, create)
    trainer = next(c for c in pod["containers"] if c["name"] == TRAINER)
    annotations = {DEFAULT_CONTAINER: TRAINER, **pod_needs.mesh(port)}
    metadata = {
        "annotations": {**annotations, **(metadata.get("annotations") or {})},
        "name": name,
        "labels": {**(metadata.get("labels") or {}), **identity},
        "ownerReferences": [owner(job)],
    }
    volumes = _volumes(job, spec, pod, trainer)
    changed = _trainer(trainer, job, spec, port, volumes)
    changed["ports"] = pod_needs.declared(trainer, port, bool(pod.get("hostNetwork")))
    pod["containers"] = [changed if c is trainer else c for c in pod["containers"]]
    pod["initContainers"] = [_installer(trainer, images), *(pod.get("initContainers") or ())]
    pod["volumes"] = [*(pod.get("volumes") or ()), *volumes]
    pod.setdefault("restartPolicy", "OnFailure")  # a container that dies with its agent comes back with its volume
    pod.setdefault("topologySpreadConstraints", [spread(job)])
    if create.avoid_nodes or create.never_nodes:
        pod["affinity"] = keeping_off(pod.get("affinity") or {}, create)
    if create.never_nodes:
        metadata["annotations"][AVOIDS] = ",".join(create.never_nodes)
    if create.spare:
        pod["affinity"] = _apart(pod.get("affinity") or {}, job)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


MOUNTS: dict[str, Raw] = {
    VOLUME: {"mountPath": VOLUME_PATH},
    IDENTITY: {"mountPath": IDENTITY_PATH, "readOnly": True},
    pod_needs.SHM: {"mountPath": pod_needs.SHM_PATH},
}


def python(container: Raw) -> str:
    """What starts Python in the container: images without a shell may have it anywhere."""
    named = (entry.get("value") for entry in container.get("env") or () if entry["name"] == PYTHON)
    return next(named, None) or "python3"


def _trainer(container: Raw, job: JobView, spec: JobSpec, port: int, volumes: list[Raw]) -> Raw:
    own = [*(container.get("command") or ()), *(container.get("args") or ())]
    command = [python(container), *AGENT, *(["--bundled"] if spec.bundled else ["--", *own])]
    environment = _environment(job, spec, port)
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
            *({"name": volume["name"], **MOUNTS[volume["name"]]} for volume in volumes),
        ],
    }
    return {**changed, "envFrom": env_from} if env_from else changed


def _environment(job: JobView, spec: JobSpec, port: int) -> list[Raw]:
    # Without what is not said: the trainer's image may be older than the operator, and refuses fields it does not know.
    config = spec.trainer.model_dump_json(by_alias=True, exclude_none=True) if spec.trainer else "{}"
    checkpoint = spec.checkpoint.model_dump_json(by_alias=True) if spec.checkpoint else "null"
    values = {
        "CONCERTINA_JOB": f"{job.namespace}/{job.name}",
        "CONCERTINA_UID": job.uid,
        "CONCERTINA_PORT": str(port),
        "CONCERTINA_WORKERS": str(spec.workers),
        "CONCERTINA_GRACE_SECONDS": str(spec.template.manifest()["spec"].get("terminationGracePeriodSeconds", 30)),
        "CONCERTINA_IMAGE": spec.template.trainer.image or "",
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


USER = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions", "seccompProfile", "appArmorProfile")
CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def _installer(trainer: Raw, images: Images) -> Raw:
    """Copies the agent into the pod. With the trainer's resources (a quota may ask for them), as its user, and with no
    rights at all: what admits the trainer admits this."""
    container: Raw = {
        "name": INIT_CONTAINER,
        "image": images.agent,
        "command": ["concertina-agent", "install", VOLUME_PATH],
        "volumeMounts": [{"name": VOLUME, "mountPath": VOLUME_PATH}],
    }
    theirs = trainer.get("securityContext") or {}
    container["securityContext"] = {**{key: theirs[key] for key in USER if key in theirs}, **CONFINED}
    resources = {
        kind: {name: amount for name, amount in (amounts or {}).items() if name in ("cpu", "memory")}
        for kind, amounts in (trainer.get("resources") or {}).items()
        if kind in ("requests", "limits")
    }
    if any(resources.values()):
        container["resources"] = resources
    return container


def _volumes(job: JobView, spec: JobSpec, pod: Raw, trainer: Raw) -> list[Raw]:
    state: Raw = {"medium": "Memory"} if spec.bundled else {}
    if spec.bundled and (memory := pod_needs.memory_of(trainer)):
        # Snapshots count towards the container's memory. What doesn't fit is "no space left", not a kill.
        state["sizeLimit"] = str(share(memory))
    volumes = (
        {"name": VOLUME, "emptyDir": state},
        {"name": IDENTITY, "secret": {"secretName": secret_name(job)}},
        pod_needs.shared_memory(pod, trainer),
    )
    return [volume for volume in volumes if volume is not None]


def spread(job: JobView) -> Raw:
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


def keeping_off(affinity: Raw, create: CreatePod) -> Raw:
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
