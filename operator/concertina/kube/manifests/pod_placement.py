"""Where a replica's pod should run, and where it must not, beside what the template asks for. Pure.

Wishes outnumber rules: a pod that the scheduler can place nowhere trains nothing, and ranks are ordered by where pods
came to be (`plan/state/rank_order.py`). The one rule is for nodes that the job can spare."""

from __future__ import annotations

from collections.abc import Sequence

from concertina.api.spec import JobSpec
from concertina.kube.manifests.names import AVOIDS, INDEX, JOB_UID
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod
from concertina.plan.observed import JobView

HOSTNAME = "kubernetes.io/hostname"
MOST_NAMED = 128
"""Replicas of a group that a wish lists one by one; of a larger one any of the job's are as near."""


def placed(pod: Raw, job: JobView, spec: JobSpec, create: CreatePod) -> Raw:
    of_job = {"labelSelector": {"matchLabels": {JOB_UID: job.uid}}, "topologyKey": HOSTNAME}
    metadata, theirs = pod.get("metadata") or {}, dict(pod["spec"])
    affinity = theirs.get("affinity") or {}
    # Replicas on different nodes where possible: copies of snapshots are for the death of a node.
    if spec.topology is None or not spec.group_sizes or spec.group_sizes[0] > MOST_NAMED:
        spread = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", **of_job}
        theirs = {"topologySpreadConstraints": [spread], **theirs}
    else:
        # By a term that the groups' own outweigh: the scheduler counts a spread for as much as all affinity together.
        affinity = _wishing(affinity, "podAntiAffinity", {"weight": 1, "podAffinityTerm": of_job})
        affinity = _near_its_groups(affinity, job, spec.topology.labels, spec.group_sizes, create.index)
    affinity = _keeping_off(affinity, create)
    if create.standby:
        # What takes a member's node shall not take its spare too.
        affinity = _wishing(affinity, "podAntiAffinity", {"weight": 100, "podAffinityTerm": of_job})
    if affinity:
        theirs["affinity"] = affinity
    if create.never_nodes:
        annotations = {**(metadata.get("annotations") or {}), AVOIDS: ",".join(create.never_nodes)}
        metadata = {**metadata, "annotations": annotations}
    return {**pod, "metadata": metadata, "spec": theirs}


def _near_its_groups(affinity: Raw, job: JobView, labels: Sequence[str], sizes: Sequence[int], index: int) -> Raw:
    """Groups of neighbours by index: the smallest within the innermost domain that spec.topology names, and its block
    within the wider ones (decision "Pods of a group wish to be near each other")."""
    smallest, block = sizes[0], sizes[-1]
    *wider, innermost = labels
    group = _neighbours(job, index, smallest)
    affinity = _wishing(affinity, "podAffinity", _term(100, group, innermost))
    # Who comes first of its group leaves the domains of others: they would be full before its group is whole.
    others = _neighbours(job, index, smallest, "NotIn")
    affinity = _wishing(affinity, "podAntiAffinity", _term(1, others, innermost))
    for label in wider:
        affinity = _wishing(affinity, "podAffinity", _term(10, _neighbours(job, index, block), label))
    return affinity


def _neighbours(job: JobView, index: int, size: int, operator: str = "In") -> Raw:
    """Selects the job's pods of the same group of so many replicas, or (NotIn) those of all others."""
    begin = index - index % size
    named = {"key": INDEX, "operator": operator, "values": [str(each) for each in range(begin, begin + size)]}
    return {"matchLabels": {JOB_UID: job.uid}, **({"matchExpressions": [named]} if size <= MOST_NAMED else {})}


def _term(weight: int, selector: Raw, label: str) -> Raw:
    return {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": label}}


def _keeping_off(affinity: Raw, create: CreatePod) -> Raw:
    """By a wish where the job can't spare the node, by a rule where it can."""
    if create.avoid_nodes:
        wish = {"weight": 100, "preference": {"matchFields": _not_on(create.avoid_nodes)}}
        affinity = _wishing(affinity, "nodeAffinity", wish)
    if create.never_nodes:
        of_nodes, key = affinity.get("nodeAffinity") or {}, "requiredDuringSchedulingIgnoredDuringExecution"
        terms = (of_nodes.get(key) or {}).get("nodeSelectorTerms") or [{}]  # one of them has to hold
        rule = _not_on(create.never_nodes)
        terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *rule]} for term in terms]
        affinity = {**affinity, "nodeAffinity": {**of_nodes, key: {"nodeSelectorTerms": terms}}}
    return affinity


def _wishing(affinity: Raw, kind: str, wish: Raw) -> Raw:
    """With one more preference of that kind: nodeAffinity, podAffinity or podAntiAffinity."""
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    theirs = affinity.get(kind) or {}
    return {**affinity, kind: {**theirs, key: [*(theirs.get(key) or ()), wish]}}


def _not_on(nodes: tuple[str, ...]) -> list[Raw]:
    # a field selector takes one value only
    return [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
