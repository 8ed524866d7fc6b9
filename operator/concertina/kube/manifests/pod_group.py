"""Manifests of the pod groups of gang schedulers, and the pod fields that refer to a pod group. All functions are pure.

Kubernetes and each gang scheduler have their own kind PodGroup. The scheduler KAI creates its PodGroup itself, as the
chart's Karta object describes.
"""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina.kube.manifests.names import labels, owner
from concertina.kube.resources import Raw, Resource
from concertina.plan.observed import GangApi, JobView, PodGroup

VOLCANO_GROUP = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Pod annotation with the name of Volcano's queue.

VOLCANO_GROUP is a pod annotation of Volcano too, despite its prefix.
"""
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
KAI_QUEUE = "kai.scheduler/queue"
"""Pod label with KAI's queue. COSCHEDULING_GROUP is a pod label too."""
SCHEDULERS = {GangApi.VOLCANO: "volcano", GangApi.KAI: "kai-scheduler"}
"""Scheduler name that a pod gets if its template has none.

Coscheduling has no entry: any scheduler can have its plugin.
"""


def resource(api: GangApi) -> Resource:
    """Return the resource (API path) of the PodGroup kind in a gang scheduling API."""
    return Resource(f"apis/{api}", "podgroups")


def pod_group_manifest(job: JobView, spec: JobSpec, group: PodGroup) -> Raw:
    """Return the manifest of a job's pod group.

    The job owns the group, so Kubernetes deletes both together.
    """
    metadata = {"name": group.name, "labels": labels(job), "ownerReferences": [owner(job)]}
    return {"apiVersion": str(group.api), "kind": "PodGroup", "metadata": metadata, "spec": _spec(spec, group)}


def minimum_patch(group: PodGroup) -> Raw:
    """Return a merge patch that sets the minimum number of pods of a PodGroup object."""
    if group.api in (GangApi.POD_GROUP, GangApi.POD_GROUP_ALPHA):
        return {"spec": {"schedulingPolicy": {"gang": {"minCount": group.min_count}}}}
    return {"spec": {"minMember": group.min_count}}


def _spec(spec: JobSpec, group: PodGroup) -> Raw:
    minimum: Raw = minimum_patch(group)["spec"]
    if group.api in (GangApi.POD_GROUP, GangApi.POD_GROUP_ALPHA):
        constraints = {"schedulingConstraints": {"topology": [{"key": group.topology}]}} if group.topology else {}
        return minimum | constraints
    if group.api is GangApi.VOLCANO:
        priority_class = (spec.template.spec.model_extra or {}).get("priorityClassName")
        queue = {"queue": group.queue} if group.queue else {}
        return minimum | queue | ({"priorityClassName": priority_class} if priority_class else {})
    return minimum


def in_pod_group(pod: Raw, group: PodGroup) -> Raw:
    """Return the pod's manifest with the fields that make the pod a member of a pod group.

    A scheduler name in the template is not changed, because a gang scheduler may run under another name.
    """
    metadata, pod_spec = pod.get("metadata") or {}, dict(pod["spec"])
    joined_labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    match group.api:
        case GangApi.POD_GROUP | GangApi.POD_GROUP_ALPHA:
            pod_spec["schedulingGroup"] = {"podGroupName": group.name}
        case GangApi.VOLCANO:
            annotations = {**annotations, VOLCANO_GROUP: group.name}
            if group.queue:
                annotations = {**annotations, VOLCANO_QUEUE: group.queue}
        case GangApi.COSCHEDULING:
            joined_labels = {**joined_labels, COSCHEDULING_GROUP: group.name}
        case GangApi.KAI:
            joined_labels = {**joined_labels, **({KAI_QUEUE: group.queue} if group.queue else {})}
    if group.api in SCHEDULERS and not pod_spec.get("schedulerName"):
        pod_spec["schedulerName"] = SCHEDULERS[group.api]
    metadata = {**metadata, "labels": joined_labels, "annotations": annotations}
    return {**pod, "metadata": metadata, "spec": pod_spec}
