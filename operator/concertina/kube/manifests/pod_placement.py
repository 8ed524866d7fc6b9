"""Rules for the nodes on which the scheduler places a replica's pod, in addition to the template's. Functions are pure.

Most rules are preferences, because a pod that the scheduler can't place trains nothing. The operator assigns ranks
later, by the nodes on which the pods actually run (`plan/state/rank_order.py`). Two rules are requirements. The first
excludes bad nodes, if the job can run without them. The second is the network domain that `spec.scheduling.topology`
requires.
"""

from __future__ import annotations

from collections.abc import Sequence

from concertina.api.spec import JobSpec, SchedulingTopology, TopologyMode
from concertina.kube.manifests.names import AVOIDS, INDEX, JOB_UID
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod
from concertina.plan.observed import JobView

HOSTNAME = "kubernetes.io/hostname"
MOST_NAMED = 128
"""Largest number of replicas in a parallel group for which a preference lists the replicas by index.

For a larger group, the preference matches all replicas of the job.
"""


def placed(pod: Raw, job: JobView, spec: JobSpec, create: CreatePod) -> Raw:
    """Return the pod's manifest with the placement rules for the pod's replica."""
    of_job = {"labelSelector": {"matchLabels": {JOB_UID: job.uid}}, "topologyKey": HOSTNAME}
    metadata, pod_spec = pod.get("metadata") or {}, dict(pod["spec"])
    affinity = pod_spec.get("affinity") or {}
    # Prefer different nodes for replicas, so that the loss of a node does not take a snapshot and its copy.
    if spec.topology is None or not spec.group_sizes or spec.group_sizes[0] > MOST_NAMED:
        spread = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", **of_job}
        pod_spec = {"topologySpreadConstraints": [spread], **pod_spec}
    else:
        # The terms of the groups have more weight than this one. A topology spread would have as much as all affinity
        # together.
        affinity = _wishing(affinity, "podAntiAffinity", {"weight": 1, "podAffinityTerm": of_job})
        affinity = _near_its_groups(affinity, job, spec.topology.labels, spec.group_sizes, create.index)
    if spec.scheduling.topology is not None:
        affinity = _in_one_domain(affinity, job, spec.scheduling.topology)
    affinity = _keeping_off(affinity, create)
    if create.standby:
        # The failure of a member's node should not take a standby replica too.
        affinity = _wishing(affinity, "podAntiAffinity", {"weight": 100, "podAffinityTerm": of_job})
    if affinity:
        pod_spec["affinity"] = affinity
    if create.never_nodes:
        annotations = {**(metadata.get("annotations") or {}), AVOIDS: ",".join(create.never_nodes)}
        metadata = {**metadata, "annotations": annotations}
    return {**pod, "metadata": metadata, "spec": pod_spec}


def _in_one_domain(affinity: Raw, job: JobView, topology: SchedulingTopology) -> Raw:
    """Return the affinity with a term that places all pods of the job in one network domain.

    `spec.scheduling.topology` decides whether the term is a requirement or a preference with the highest weight. The
    scheduler exempts the first pod from the requirement, because the job has no other pod yet.
    """
    # The pod of torchrun's store has no index, and may be in any domain.
    of_job = {"matchLabels": {JOB_UID: job.uid}, "matchExpressions": [{"key": INDEX, "operator": "Exists"}]}
    if topology.mode is TopologyMode.PREFERRED:
        return _wishing(affinity, "podAffinity", _term(100, of_job, topology.key))
    terms, key = affinity.get("podAffinity") or {}, "requiredDuringSchedulingIgnoredDuringExecution"
    rule = {"labelSelector": of_job, "topologyKey": topology.key}
    return {**affinity, "podAffinity": {**terms, key: [*(terms.get(key) or ()), rule]}}


def _near_its_groups(affinity: Raw, job: JobView, labels: Sequence[str], sizes: Sequence[int], index: int) -> Raw:
    """Return the affinity with preferences that place a pod near the other pods of its parallel groups.

    The pods of the smallest parallel group should share the innermost domain of `spec.topology`. The pods of a block
    (the largest parallel group) should share the wider domains (decision "Preferred affinity for the pods of a group").
    """
    smallest, block = sizes[0], sizes[-1]
    *wider, innermost = labels
    group = _neighbours(job, index, smallest)
    affinity = _wishing(affinity, "podAffinity", _term(100, group, innermost))
    # The first pod of a group avoids domains of other groups, which may become full before its own group is complete.
    others = _neighbours(job, index, smallest, "NotIn")
    affinity = _wishing(affinity, "podAntiAffinity", _term(1, others, innermost))
    for label in wider:
        affinity = _wishing(affinity, "podAffinity", _term(10, _neighbours(job, index, block), label))
    return affinity


def _neighbours(job: JobView, index: int, size: int, operator: str = "In") -> Raw:
    """Return a label selector for the job's pods in the same parallel group of `size` replicas as replica `index`.

    If `operator` is NotIn, the selector matches the job's pods in all other groups instead. If the group has more than
    MOST_NAMED replicas, the selector matches all of the job's pods.
    """
    begin = index - index % size
    expression = {
        "key": INDEX,
        "operator": operator,
        "values": [str(neighbour) for neighbour in range(begin, begin + size)],
    }
    return {"matchLabels": {JOB_UID: job.uid}, **({"matchExpressions": [expression]} if size <= MOST_NAMED else {})}


def _term(weight: int, selector: Raw, label: str) -> Raw:
    return {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}


def _keeping_off(affinity: Raw, create: CreatePod) -> Raw:
    """Return the affinity with rules that keep the pod away from certain nodes.

    The nodes are listed in `create`: for `avoid_nodes`, the rule is a preference; for `never_nodes`, it is a
    requirement.
    """
    if create.avoid_nodes:
        wish = {"weight": 100, "preference": {"matchFields": _not_on(create.avoid_nodes)}}
        affinity = _wishing(affinity, "nodeAffinity", wish)
    if create.never_nodes:
        of_nodes, key = affinity.get("nodeAffinity") or {}, "requiredDuringSchedulingIgnoredDuringExecution"
        terms = (of_nodes.get(key) or {}).get("nodeSelectorTerms") or [{}]  # the terms are alternatives
        rule = _not_on(create.never_nodes)
        terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *rule]} for term in terms]
        affinity = {**affinity, "nodeAffinity": {**of_nodes, key: {"nodeSelectorTerms": terms}}}
    return affinity


def _wishing(affinity: Raw, kind: str, wish: Raw) -> Raw:
    """Return the affinity with the preference `wish` added.

    `kind` is nodeAffinity, podAffinity or podAntiAffinity.
    """
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    terms = affinity.get(kind) or {}
    return {**affinity, kind: {**terms, key: [*(terms.get(key) or ()), wish]}}


def _not_on(nodes: tuple[str, ...]) -> list[Raw]:
    # a field selector takes one value only
    return [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
