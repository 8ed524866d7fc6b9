"""Manifests of the Kueue Workloads with which a job requests quota. All functions are pure.

A Workload's pod sets contain only the fields that determine where pods fit and which resources they use. Kueue compares
Workloads field by field, and any other field could make two equal requests look different.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from concertina.api import GROUP, KIND
from concertina.api.spec import JobSpec
from concertina.api.status import rfc3339
from concertina.kube.manifests import torchrun_pod
from concertina.kube.manifests.names import MANAGED_BY, owner
from concertina.kube.resources import Raw
from concertina.plan.actions import CreateWorkload
from concertina.plan.kueue import PodChanges, PodSet, Request, wanted_sets
from concertina.plan.observed import JobView

API_VERSION = "kueue.x-k8s.io/v1beta2"
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
PREBUILT_WORKLOAD = "kueue.x-k8s.io/prebuilt-workload-name"
"""Label of a job with the name of an existing Workload. The two constants above are labels of a job too."""
JOB_UID = "kueue.x-k8s.io/job-uid"
POD_SET = "kueue.x-k8s.io/podset"
"""Label of a pod with the name of its pod set in the Workload. JOB_UID above is a label of a Workload."""
FINALIZER = "kueue.x-k8s.io/resource-in-use"
ELASTIC = "kueue.x-k8s.io/elastic-job"
REPLACEMENT_FOR = "kueue.x-k8s.io/workload-slice-replacement-for"
SLICE_NAME = "kueue.x-k8s.io/workload-slice-name"
"""Annotation of Kueue with the name of a job's first Workload slice.

The two constants above are annotations of Kueue too.
"""
NUMBER = "concertina.dev/slice"
REQUEST_HASH = "concertina.dev/request-hash"
JOB_GENERATION = "concertina.dev/job-generation"
SHRUNK_FOR = "concertina.dev/shrunk-for"
SHRUNK_AT = "concertina.dev/shrunk-at"
PAUSED = "concertina.dev/paused"
"""Annotation that says that the operator itself deactivated the Workload.

The five constants above are annotations of this operator too.
"""
PREFIX, HASH = 57, 5
"""Maximum length of a Workload's name before the hash, and length of the hash, in characters.

The name is also used as a label value, which has a maximum length.
"""
_POD_FIELDS = (
    "affinity", "nodeSelector", "overhead", "priorityClassName", "resourceClaims", "resources", "runtimeClassName",
    "tolerations",
)  # fmt: skip
_CONTAINER_FIELDS = ("name", "resources", "restartPolicy")


def workload_name(job: JobView, number: int) -> str:
    """Return the name of the job's Workload with the given number.

    The name has the form that Kueue gives its own Workloads.
    """
    identity = "\n".join((KIND, GROUP, job.name, job.uid, str(number)))
    digest = hashlib.sha1(identity.encode(), usedforsecurity=False).hexdigest()
    return f"{f'{KIND.lower()}-{job.name}'[:PREFIX]}-{digest[:HASH]}"


def pod_sets(spec: JobSpec, request: Request) -> list[Raw]:
    """Return the pod sets of a Workload, with the pod counts of `request`."""
    templates = dict(_templates(spec))
    return [{"name": str(pod_set), "count": count, "template": templates[pod_set]} for pod_set, count in request]


def request_hash(spec: JobSpec) -> str:
    """Return a hash of a Workload's pod sets without their pod counts.

    If the hash changes, the job needs a new Workload.
    """
    return _hash(tuple((str(pod_set), json.dumps(template, sort_keys=True)) for pod_set, template in _templates(spec)))


@functools.lru_cache(maxsize=4096)
def _hash(templates: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(json.dumps(templates).encode()).hexdigest()[:16]


def workload_manifest(job: JobView, spec: JobSpec, create: CreateWorkload, queue: str, class_ref: Raw | None) -> Raw:
    """Return the manifest of a Workload that requests quota from a queue.

    Args:
        job: Job that owns the Workload.
        spec: Spec of the job.
        create: Planned Workload.
        queue: Name of the LocalQueue.
        class_ref: Reference to the job's priority class, or None.
    """
    annotations = {
        NUMBER: str(create.number),
        REQUEST_HASH: request_hash(spec),
        JOB_GENERATION: str(job.generation),
    }
    if create.elastic:
        annotations[ELASTIC] = "true"
    if create.replaces:
        annotations[REPLACEMENT_FOR] = f"{job.namespace}/{create.replaces}"
        annotations[SLICE_NAME] = create.slice_name
    if create.shrunk_at is not None:
        annotations[SHRUNK_AT] = rfc3339(create.shrunk_at)
    by_class = {"priorityClassRef": class_ref} if create.by_class and class_ref else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job, create.number),
            "namespace": job.namespace,
            "labels": {**MANAGED_BY, JOB_UID: job.uid},
            "annotations": annotations,
            "finalizers": [FINALIZER],
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "queueName": queue,
            "priority": create.priority,
            "active": True,
            "podSets": pod_sets(spec, create.request),
            **by_class,
        },
    }


def _templates(spec: JobSpec) -> list[tuple[PodSet, Raw]]:
    template = spec.template.manifest()
    trainer = _trimmed(template)
    sets = wanted_sets(spec)
    store = _trimmed(torchrun_pod.store(template)) if PodSet.RENDEZVOUS in sets else {}
    return [(pod_set, store if pod_set is PodSet.RENDEZVOUS else trainer) for pod_set in sets]


def _trimmed(template: Mapping[str, Any]) -> Raw:
    spec = template["spec"]
    trimmed = {name: spec[name] for name in _POD_FIELDS if spec.get(name)}
    trimmed["containers"] = [_container(container) for container in spec["containers"]]
    if init_containers := spec.get("initContainers"):
        trimmed["initContainers"] = [_container(container) for container in init_containers]
    return {"spec": trimmed}


def _container(container: Mapping[str, Any]) -> Raw:
    return {name: container[name] for name in _CONTAINER_FIELDS if container.get(name)}


# --- fields that an admission adds to pods


def admitted(pod: Raw, changes: PodChanges) -> Raw:
    """Return the pod's manifest with the changes that Kueue's admission requires.

    The changes are labels, annotations, the node selector and tolerations.
    """
    metadata, spec = pod["metadata"], dict(pod["spec"])
    if changes.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **changes.node_selector}
    tolerations = list(spec.get("tolerations") or ())
    added = [dict(toleration) for toleration in changes.tolerations if toleration not in tolerations]
    if added:
        spec["tolerations"] = [*tolerations, *added]
    gates = list(spec.get("schedulingGates") or ())
    new_gates = [{"name": name} for name in changes.scheduling_gates if {"name": name} not in gates]
    if new_gates:
        spec["schedulingGates"] = [*gates, *new_gates]
    labels = {**(metadata.get("labels") or {}), **changes.labels}
    annotations = {**(metadata.get("annotations") or {}), **changes.annotations}
    return {**pod, "metadata": {**metadata, "labels": labels, "annotations": annotations}, "spec": spec}


def conflict(spec: JobSpec, changes: Mapping[PodSet, PodChanges]) -> str:
    """Return a sentence that says where Kueue's admission contradicts the pod template; empty if nowhere."""
    template = spec.template.manifest()
    metadata = template.get("metadata") or {}
    for pod_set, change in changes.items():
        fields = (
            ("nodeSelector", template["spec"].get("nodeSelector") or {}, change.node_selector),
            ("label", metadata.get("labels") or {}, change.labels),
            ("annotation", metadata.get("annotations") or {}, change.annotations),
        )
        for field, own, added in fields:
            for name, value in added.items():
                if own.get(name, value) != value:
                    return (
                        f"The admission of pod set {pod_set} sets {field} {name} to {value}, and spec.template sets it "
                        f"to {own[name]}. Remove it from the template"
                    )
    return ""
