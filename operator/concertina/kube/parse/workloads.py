"""Convert Kueue's objects into the data types of plan().

Long texts and lists are cut to a maximum size. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from concertina.api import GROUP, KIND
from concertina.api.status import unix_seconds
from concertina.kube.manifests import workload as manifest
from concertina.kube.parse.room import amounts
from concertina.kube.resources import Raw
from concertina.plan.kueue import (
    Assignment,
    ConditionName,
    FlavorView,
    PodChanges,
    WorkloadCondition,
    WorkloadView,
)
from concertina_protocol.quantities import parse_quantity

NAME, WORD, SENTENCE = 253, 64, 4096
"""Maximum number of characters of a name, a reason and a message. Longer texts are cut."""
MOST_SETS, MOST_CHECKS, MOST_PAIRS, MOST_TOLERATIONS = 18, 16, 64, 64
"""Maximum number of pod sets, admission checks, labels (or other pairs) and tolerations that the operator reads."""
MOST_PODS = 1_000_000
_SHORTFALL = re.compile(r"insufficient unused quota for (\S{1,253}) in flavor (\S{1,253}), (\S{1,40}) more needed")
_VICTIMS = re.compile(r"Pending the preemption of (\d{1,6}) workload")
_PREEMPTOR = re.compile(r"Preempted to accommodate a workload \(UID: ([0-9A-Za-z-]{1,64}),")
_NUMBER = re.compile("[0-9]{1,9}")


def workload_view(obj: Raw) -> WorkloadView:
    """Return the data of a Workload that plan() needs."""
    metadata, spec, status = obj["metadata"], _mapping(obj.get("spec")), _mapping(obj.get("status"))
    annotations, conditions = _texts(metadata.get("annotations")), _conditions(status)
    pod_sets = _named(spec.get("podSets"), MOST_SETS)
    reserved = conditions.get(ConditionName.QUOTA_RESERVED, WorkloadCondition(true=False))
    evicted = conditions.get(ConditionName.EVICTED, WorkloadCondition(true=False))
    victims = _VICTIMS.search(reserved.message)
    preemptor = _PREEMPTOR.search(evicted.message) if evicted.true else None
    admission = status.get("admission")
    return WorkloadView(
        name=metadata["name"],
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        version=str(metadata["resourceVersion"]),
        generation=_integer(metadata.get("generation")),
        created=unix_seconds(metadata["creationTimestamp"]),
        job_uid=_job_uid(metadata),
        queue=_text(spec.get("queueName"), NAME),
        number=_digits(annotations.get(manifest.NUMBER)),
        job_generation=_digits(annotations.get(manifest.JOB_GENERATION)),
        counts={name: _count(pod_set.get("count", 1)) for name, pod_set in pod_sets.items()},
        requests=_requests(pod_sets.values()),
        request_hash=annotations.get(manifest.REQUEST_HASH, "")[:WORD],
        priority=_integer(spec.get("priority")),
        active=spec.get("active") is not False,
        paused=annotations.get(manifest.PAUSED) == "true",
        elastic=annotations.get(manifest.ELASTIC) == "true",
        replaces=_name_of(annotations.get(manifest.REPLACEMENT_FOR, ""), metadata["namespace"]),
        slice_name=annotations.get(manifest.SLICE_NAME, "")[:NAME],
        deleting="deletionTimestamp" in metadata,
        has_finalizer=manifest.FINALIZER in (metadata.get("finalizers") or ()),
        cluster_queue=_text(_mapping(admission).get("clusterQueue"), NAME),
        admission=_admission(_mapping(admission), pod_sets) if admission else None,
        conditions=conditions,
        check_changes=_check_changes(status),
        check_messages=_check_messages(status),
        shortfalls=_shortfalls(reserved.message),
        victims=int(victims[1]) if victims else None,
        preemptor_uid=preemptor[1] if preemptor else "",
        shrunk_for=annotations.get(manifest.SHRUNK_FOR, "")[:WORD],
        shrunk_at=_time(annotations.get(manifest.SHRUNK_AT, "")),
    )


def flavor_view(obj: Raw) -> FlavorView:
    """Return the data of a ResourceFlavor that plan() needs."""
    spec = _mapping(obj.get("spec"))
    return FlavorView(obj["metadata"]["name"], _texts(spec.get("nodeLabels")), _tolerations(spec.get("tolerations")))


@dataclass(frozen=True)
class PriorityClassView:
    name: str
    value: int
    is_default: bool = False


def priority_class_view(obj: Raw) -> PriorityClassView:
    """Return the data of a WorkloadPriorityClass or of a PriorityClass."""
    return PriorityClassView(obj["metadata"]["name"], _integer(obj.get("value")), obj.get("globalDefault") is True)


# --- parts of a Workload


def _job_uid(metadata: Raw) -> str:
    owners: Iterable[Raw] = metadata.get("ownerReferences") or ()
    for reference in owners:
        group = str(reference.get("apiVersion", "")).partition("/")[0]
        if reference.get("controller") and reference.get("kind") == KIND and group == GROUP:
            return _text(reference.get("uid"), WORD)
    return ""


def _name_of(key: str, namespace: str) -> str:
    """Return the name from a key of the form namespace/name; empty if the key is for another namespace."""
    own, _, name = key.partition("/")
    return name[:NAME] if own == namespace else ""


def _conditions(status: Mapping[str, Any]) -> Mapping[str, WorkloadCondition]:
    entries = status.get("conditions")
    return {
        str(entry["type"])[:WORD]: WorkloadCondition(
            true=entry.get("status") == "True",
            reason=_text(entry.get("reason"), WORD),
            message=_text(entry.get("message"), SENTENCE),
            since=_text(entry.get("lastTransitionTime"), WORD),
            generation=_integer(entry.get("observedGeneration")),
        )
        for entry in (entries if isinstance(entries, list) else [])[:MOST_CHECKS]
        if isinstance(entry, dict) and "type" in entry
    }


def _admission(admission: Mapping[str, Any], pod_sets: Mapping[str, Raw]) -> Mapping[str, Assignment]:
    assignments = _named(admission.get("podSetAssignments"), MOST_SETS)
    return {
        name: Assignment(
            count=_count(assignment.get("count", _mapping(pod_sets.get(name)).get("count", 1))),
            flavors=_texts(assignment.get("flavors")),
            usage=_amounts(assignment.get("resourceUsage")),
            topology=bool(assignment.get("topologyAssignment")),
        )
        for name, assignment in assignments.items()
    }


def _check_changes(status: Mapping[str, Any]) -> Mapping[str, tuple[PodChanges, ...]]:
    changes: dict[str, tuple[PodChanges, ...]] = {}
    for check in _checks(status):
        for name, update in _named(check.get("podSetUpdates"), MOST_SETS).items():
            change = PodChanges(
                labels=_texts(update.get("labels")),
                annotations=_texts(update.get("annotations")),
                node_selector=_texts(update.get("nodeSelector")),
                tolerations=_tolerations(update.get("tolerations")),
            )
            changes[name] = (*changes.get(name, ()), change)
    return changes


def _check_messages(status: Mapping[str, Any]) -> tuple[str, ...]:
    waiting = (check for check in _checks(status) if check.get("state") != "Ready")
    return tuple(f"{_text(check.get('name'), NAME)}: {_text(check.get('message'), WORD * 4)}" for check in waiting)


def _checks(status: Mapping[str, Any]) -> list[Raw]:
    checks = status.get("admissionChecks")
    return [check for check in (checks if isinstance(checks, list) else [])[:MOST_CHECKS] if isinstance(check, dict)]


def _shortfalls(message: str) -> Mapping[tuple[str, str], Decimal]:
    lacking: dict[tuple[str, str], Decimal] = {}
    for resource, flavor, quantity in _SHORTFALL.findall(message):
        try:
            amount = parse_quantity(quantity)
        except ValueError:
            continue
        lacking[resource, flavor] = max(amount, lacking.get((resource, flavor), Decimal(0)))
    return lacking


def _requests(pod_sets: Iterable[Raw]) -> Mapping[str, Decimal]:
    """Return the total amounts of resources that the containers of all pods in the pod sets request."""
    total: dict[str, Decimal] = {}
    for pod_set in pod_sets:
        spec = _mapping(_mapping(pod_set.get("template")).get("spec"))
        for container in (spec.get("containers") or ())[:MOST_SETS]:
            resources = _mapping(_mapping(container).get("resources"))
            requests = {**_mapping(resources.get("limits")), **_mapping(resources.get("requests"))}
            for name, amount in _amounts(requests).items():
                total[name] = total.get(name, Decimal(0)) + amount * _count(pod_set.get("count", 1))
    return total


# --- bounded values


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _named(value: object, most: int) -> dict[str, Raw]:
    entries = [entry for entry in (value if isinstance(value, list) else [])[:most] if isinstance(entry, dict)]
    return {_text(entry.get("name", "main"), NAME): entry for entry in entries}


def _texts(value: object) -> dict[str, str]:
    pairs = list(_mapping(value).items())[:MOST_PAIRS]
    return {str(name)[: 2 * NAME]: str(text)[:SENTENCE] for name, text in pairs}


def _amounts(value: object) -> Mapping[str, Decimal]:
    try:
        return amounts(dict(list(_mapping(value).items())[:MOST_PAIRS]))
    except ValueError:
        return {}


def _tolerations(value: object) -> tuple[Mapping[str, Any], ...]:
    entries = (value if isinstance(value, list) else [])[:MOST_TOLERATIONS]
    return tuple(entry for entry in entries if isinstance(entry, dict))


def _text(value: object, most: int) -> str:
    return "" if value is None else str(value)[:most]


def _integer(value: object) -> int:
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else 0


def _count(value: object) -> int:
    return min(max(0, _integer(value)), MOST_PODS)


def _digits(text: str | None) -> int:
    return int(text) if text and _NUMBER.fullmatch(text) else 0


def _time(text: str) -> float | None:
    try:
        return unix_seconds(text[:WORD]) if text else None
    except ValueError:
        return None
