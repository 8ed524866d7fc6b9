"""Pod groups of gang schedulers, and the fields by which pods join them. Pure.

Kubernetes and each scheduler have a kind PodGroup of their own. KAI writes its PodGroup itself, as the object Karta in
the chart describes it.
"""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina.kube.manifests.names import labels, owner
from concertina.kube.resources import Raw, Resource
from concertina.plan.observed import GangApi, JobView, PodGroup

VOLCANO_GROUP = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""The two constants above are annotations of pods. Both are Volcano's, although the first has the prefix of
Kubernetes."""
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
KAI_QUEUE = "kai.scheduler/queue"
"""The two constants above are labels of pods."""
SCHEDULERS = {GangApi.VOLCANO: "volcano", GangApi.KAI: "kai-scheduler"}
"""Name of the scheduler for a template that names none. Coscheduling is a plugin of whatever scheduler it runs in."""


def resource(api: GangApi) -> Resource:
    """Return the kind of the pod group's object."""
    return Resource(f"apis/{api}", "podgroups")


def pod_group_manifest(job: JobView, spec: JobSpec, group: PodGroup) -> Raw:
    """Return the object of a pod group.

    Garbage collection deletes it with the job.
    """
    metadata = {"name": group.name, "labels": labels(job), "ownerReferences": [owner(job)]}
    return {"apiVersion": str(group.api), "kind": "PodGroup", "metadata": metadata, "spec": _spec(spec, group)}


def minimum_patch(group: PodGroup) -> Raw:
    """Return a merge patch that sets the minimum of a pod group."""
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
    """Return the pod as a member of a pod group.

    A scheduler that the template names stays: one of these schedulers may run under another name.
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
