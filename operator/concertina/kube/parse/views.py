"""Convert pods, nodes and TrainingJobs into the data types of plan(). All functions are pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from concertina.api import CHECKPOINT_NOW, KIND, MANAGER, TRAINER, pod_names
from concertina.api.internal import with_packed
from concertina.api.parse import SpecError, parse_stored
from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus, unix_seconds
from concertina.kube.deep_json import DEEPEST
from concertina.kube.manifests.names import AVOIDS, PORT_NAME, ROUND, TEMPLATE_HASH
from concertina.kube.manifests.pod import END_POD, template_hash
from concertina.kube.manifests.workload import POD_SET, PREBUILT_WORKLOAD, PRIORITY_CLASS, QUEUE_NAME, request_hash
from concertina.kube.parse.fault_conditions import DRILL, FAULT_CONDITIONS
from concertina.kube.parse.notice_taints import NOTICE_TAINTS
from concertina.kube.parse.room import amounts, excluded
from concertina.kube.resources import Raw
from concertina.plan.observed import UNSCHEDULABLE, JobView, NodeView, PodPhase, PodView
from concertina_protocol import PORT

_STARTING = ("", "ContainerCreating", "PodInitializing")
"""Reasons in a container's `waiting` state that are normal while the container starts."""
_HELD_BACK = ("CrashLoopBackOff", "RunContainerError")
"""Reasons in a container's `waiting` state that mean that the container keeps failing.

The kubelet restarts the container with increasing delays.
"""
_NUMBER = re.compile("[0-9]{1,9}")
NAME, WORD, SENTENCE = 253, 128, 4096
"""Maximum number of characters of a name, a word and a sentence from container runtimes, kubelets and schedulers.

Longer texts are cut.
"""
IMAGE = 512
"""Maximum number of characters of an image reference. A longer reference is cut.

The name of the repository has at most 255 characters. The rest is for the host and the digest.
"""
MOST_REQUEST = 63
"""Maximum number of characters of a checkpoint request (the value of an annotation), which is also sent to agents."""
MOST_PROBLEMS, MOST_IGNORED, MOST_FINALIZERS = 16, 64, 64
"""Maximum number of problems, ignored fields and finalizers of a TrainingJob that the operator reads.

A template of 256 KiB can have a hundred thousand errors.
"""
MOST_INDEXES = 11_000
"""Upper limit for replica indexes. A job can't have this many replicas and standby replicas.

The limit bounds `status.internal.attempts`, which has an entry for each index.
"""
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_ZONE = "topology.kubernetes.io/zone"
_SPOT = (
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("node.kubernetes.io/lifecycle", "spot"),
)
"""Node labels with which clouds and autoscalers mark spot nodes, which cost less and can be reclaimed."""


@dataclass(frozen=True)
class OwnedPod:
    """Data of a pod, with the uid of the job that owns the pod."""

    job_uid: str
    """Uid of the TrainingJob that owns the pod.

    It is empty if the pod only has the operator's labels, or if its name is not that of a pod of the job.
    """
    namespace: str
    view: PodView


def pod_view(obj: Raw) -> OwnedPod:
    """Return the data of a pod that plan() needs, with the uid of its job."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    owner, index, attempt = _owner(metadata)
    waiting, waiting_message = _waiting(status)
    code, reason, message = _exit(status)
    spec: Raw = obj.get("spec") or {}
    phase = _phase(status)
    lingers = phase in (PodPhase.RUNNING, PodPhase.PENDING) and _is_over(spec, status)
    view = PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        index=index,
        attempt=attempt,
        created=unix_seconds(metadata["creationTimestamp"]),
        phase=(PodPhase.FAILED if code else PodPhase.SUCCEEDED) if lingers else phase,
        deleting="deletionTimestamp" in metadata,
        node=(spec.get("nodeName") or "")[:NAME],
        ip=status.get("podIP") or "",
        waiting=waiting[:WORD],
        waiting_message=waiting_message[:SENTENCE],
        awaited_scheduler=_awaited_scheduler(spec, status)[:NAME],
        avoids=tuple(filter(None, annotations.get(AVOIDS, "").split(","))),
        exit_code=code,
        exit_reason=reason[:WORD],
        exit_message=message[-SENTENCE:],
        grace=_grace(obj),
        deletion_at=unix_seconds(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        disruption=_disruption(status)[:WORD],
        priority=spec.get("priority") or 0,
        lingers=lingers,
        port=_port(spec),
        round=_number(labels.get(ROUND)),
        ending=END_POD.items() <= spec.items(),
        template_hash=annotations.get(TEMPLATE_HASH, ""),
        requests=_requests(spec),
        excluded=waiting == UNSCHEDULABLE and excluded(waiting_message),
        pod_set=labels.get(POD_SET, ""),
        scheduling_group=((spec.get("schedulingGroup") or {}).get("podGroupName") or "")[:NAME],
        image=(_trainer(status).get("imageID") or "")[:IMAGE],
        **_restarts(status),
    )
    return OwnedPod(owner, metadata["namespace"], view)


def node_view(
    obj: Raw,
    notice_taints: Collection[str] = NOTICE_TAINTS,
    fault_conditions: Collection[str] = FAULT_CONDITIONS,
) -> NodeView:
    """Return the data of a node that plan() needs.

    Args:
        obj: Manifest of the node.
        notice_taints: Taints that announce the termination of a node, as KEY or KEY=VALUE.
        fault_conditions: Node conditions that say that a node is faulty, as TYPE or TYPE=STATUS.
    """
    spec, labels = obj.get("spec") or {}, obj["metadata"].get("labels") or {}
    taints = spec.get("taints") or ()
    status: Raw = obj.get("status") or {}
    conditions = status.get("conditions") or ()
    ready: Raw = next((condition for condition in conditions if condition["type"] == "Ready"), {})
    is_ready = ready.get("status") == "True"
    faults = (
        (text, unix_seconds(condition["lastTransitionTime"]) if condition.get("lastTransitionTime") else 0.0)
        for condition in conditions
        if (text := _fault(condition, fault_conditions))
    )
    fault, since = min(faults, key=lambda fault: fault[1], default=("", 0.0))
    return NodeView(
        name=obj["metadata"]["name"],
        ready=is_ready,
        out_of_service=any(taint["key"] == _OUT_OF_SERVICE for taint in taints),
        notice=next((name for taint in taints for name in _names(taint) if name in notice_taints), ""),
        cordoned=bool(spec.get("unschedulable")),
        fault=fault,
        fault_since=since,
        drilled_job=next(
            (condition.get("message") or "" for condition in conditions if condition["type"] == DRILL), ""
        ),
        zone=labels.get(_ZONE, ""),
        labels=labels,
        spot=any(labels.get(key) == value for key, value in _SPOT),
        allocatable=amounts(status.get("allocatable") or {}),
    )


def _fault(condition: Raw, fault_conditions: Collection[str]) -> str:
    """Return a node's condition with its message if it says that the node is faulty; otherwise an empty text."""
    kind, status = condition["type"], condition.get("status")
    if f"{kind}={status}" not in fault_conditions and not (status == "True" and kind in fault_conditions):
        return ""
    message = condition.get("message") or condition.get("reason") or "no message"
    return f"the node has the condition {kind}={status} ({message})"[:SENTENCE]


def job_view(obj: Raw, before: JobView | None = None) -> JobView:
    """Return the data of a TrainingJob that plan() needs.

    Args:
        obj: Manifest of the job.
        before: Earlier result for the same job. If the spec has not changed, it need not be parsed again.
    """
    metadata = obj["metadata"]
    generation = int(metadata.get("generation") or 0)
    claims_error = ""
    if before is not None and (before.uid, before.generation) == (metadata["uid"], generation):
        claims_error = before.claims_error
        spec, spec_error, ignored, made_of = before.spec, before.spec_error, before.ignored, before.template_hash
        asks_for = before.request_hash
    else:
        spec, spec_error, ignored, made_of = _spec(obj)
        asks_for = _request_hash(spec)
    labels = metadata.get("labels") or {}
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=generation,
        created=unix_seconds(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        spec_error=spec_error,
        status=status_of(obj),
        ignored=ignored,
        claims_error=claims_error,
        checkpoint_request=checkpoint_asked(obj),
        template_hash=made_of,
        finalizers=tuple(name[:NAME] for name in (metadata.get("finalizers") or ())[:MOST_FINALIZERS]),
        queue=labels.get(QUEUE_NAME, ""),
        priority_class=labels.get(PRIORITY_CLASS, ""),
        prebuilt_workload=labels.get(PREBUILT_WORKLOAD, ""),
        request_hash=asks_for,
    )


def _spec(obj: Raw) -> tuple[JobSpec | None, str, tuple[str, ...], str]:
    """Return the spec or an error, the paths of ignored fields, and a hash of the pod template.

    The function never raises an exception, because an error in one job's manifest must not affect other jobs.
    """
    try:
        spec, ignored = parse_stored(obj)
        return spec.packed(), "", ignored[:MOST_IGNORED], "" if ignored else template_hash(spec)
    except SpecError as error:
        return None, _sentence(error.problems), (), ""
    except RecursionError:
        return None, f"spec is nested more than {DEEPEST} levels deep: reduce the nesting", (), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        return (
            None,
            (
                f"spec: the operator can't read it ({why}): correct the values that are not valid in a pod, or "
                "report this"
            ),
            (),
            "",
        )


def _request_hash(spec: JobSpec | None) -> str:
    """Return the hash of the pod sets that the job requests from its queue; empty if the template is malformed."""
    try:
        return request_hash(spec) if spec is not None else ""
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


def _sentence(problems: Sequence[str]) -> str:
    remaining = len(problems) - MOST_PROBLEMS
    shown = [problem[:SENTENCE] for problem in problems[:MOST_PROBLEMS]]
    return "; ".join([*shown, *([f"and {remaining} more"] if remaining > 0 else [])])


def other_manager(obj: Raw) -> str:
    """Return the name of the controller in `spec.managedBy` if it is not this operator; otherwise an empty text."""
    spec = obj.get("spec")
    manager = spec.get("managedBy") if isinstance(spec, dict) else None
    return manager if isinstance(manager, str) and manager != MANAGER else ""


def checkpoint_asked(obj: Raw) -> str:
    """Return the checkpoint request from the TrainingJob's annotation; empty if there is none."""
    return str((obj["metadata"].get("annotations") or {}).get(CHECKPOINT_NOW, ""))[:MOST_REQUEST]


def status_of(obj: Raw) -> JobStatus:
    """Return a TrainingJob's status, without the fields that can't be parsed.

    If a newer version of the operator wrote a value that this version can't parse, a Complete job must not run again or
    lose its round (decision "Unreadable parts of a status are ignored"). If an object in the status lacks a required
    field, the whole object is left out.
    """
    readable: Any = with_packed(obj.get("status") or {})
    while True:
        try:
            return JobStatus.model_validate(readable)
        except ValidationError as error:
            readable = copy.deepcopy(readable)
            locations = [_place_of(readable, detail["loc"]) for detail in error.errors(include_url=False)]
            # Entries of a list are deleted from the end, so that the indexes of the remaining entries stay valid.
            containers = {(id(container), key): container for container, key in filter(None, locations)}
            if not containers:
                return JobStatus()
            for (_, key), container in sorted(
                containers.items(), key=lambda item: str(item[0][1]).zfill(9), reverse=True
            ):
                del container[key]


def _place_of(status: Raw, location: tuple[int | str, ...]) -> tuple[Any, Any] | None:
    """Return the mapping or list that contains the field at `location`, and the field's key or index in it.

    If a part of `location` does not exist, the result is for the last existing object on the path. If not even the
    first part exists, the result is None.
    """
    field_location: tuple[Any, Any] | None = None
    value: Any = status
    part: Any
    for part in location:
        if not (isinstance(value, dict) and part in value) and not (isinstance(value, list) and isinstance(part, int)):
            break
        field_location, value = (value, part), value[part]
    return field_location


def _owner(metadata: Raw) -> tuple[str, int | None, int]:
    """Return the uid of the TrainingJob that owns a pod, and the pod's replica index and attempt.

    The index and the attempt come from the pod's name, because a name can't be changed but a label can (decision "A
    replica's index comes from its pod's name"). The uid is empty if the pod belongs to no job.
    """
    owners: Iterable[Raw] = metadata.get("ownerReferences") or ()
    owner: Raw = next(
        (reference for reference in owners if reference.get("controller") and reference.get("kind") == KIND), {}
    )
    name = pod_names.parse(metadata["name"])
    if not owner or name is None or name.job != owner["name"] or (name.index or 0) >= MOST_INDEXES:
        return "", None, 0
    return owner["uid"], name.index, name.attempt


def _phase(status: Raw) -> PodPhase:
    word = status.get("phase") or PodPhase.PENDING
    return PodPhase(word) if word in PodPhase._value2member_map_ else PodPhase.UNKNOWN


def _waiting(status: Raw) -> tuple[str, str]:
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in _STARTING:
            return waiting["reason"], waiting.get("message") or ""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason") or UNSCHEDULABLE, condition.get("message") or ""
    return "", ""


def _awaited_scheduler(spec: Raw, status: Raw) -> str:
    """Return the name of the scheduler that has not tried to place the pod yet; empty once it has tried."""
    conditions = status.get("conditions") or ()
    if spec.get("nodeName") or any(condition["type"] == "PodScheduled" for condition in conditions):
        return ""
    return spec.get("schedulerName") or "default-scheduler"


def _exit(status: Raw) -> tuple[int | None, str, str]:
    """Return the exit code, reason and message with which the container `trainer` ended.

    If an init container failed, or the pod as a whole (by an eviction, for example), the result describes that failure
    instead.
    """
    pod_reason, pod_message = status.get("reason") or "", status.get("message") or ""
    for container in _containers(status):
        ended = (container.get("state") or {}).get("terminated") or _held_back(container)
        failed_init = ended and ended["exitCode"] and container["name"] != TRAINER
        if ended and (container["name"] == TRAINER or failed_init):
            reason = pod_reason or ended.get("reason") or ""
            return ended["exitCode"], reason, (ended.get("message") or pod_message).strip()
    return None, pod_reason, pod_message


def _is_over(spec: Raw, status: Raw) -> bool:
    """Return whether a pod is over for the operator, although Kubernetes may still report it as running.

    A pod is over if its trainer container has ended for good, or if the trainer or an init container keeps failing.
    Kubernetes reports such pods as running, because sidecars may run forever, and because a kubelet restarts containers
    forever (decision "A pod ends with its trainer container").
    """
    init_containers: Iterable[Raw] = spec.get("initContainers") or ()
    before = {container["name"] for container in init_containers if container.get("restartPolicy") != "Always"}
    statuses: Iterable[Raw] = status.get("initContainerStatuses") or ()
    if any(container["name"] in before and _held_back(container) for container in statuses):
        return True
    policy, trainer = spec.get("restartPolicy"), _trainer(status)
    ended = (trainer.get("state") or {}).get("terminated")
    final = policy == "Never" or (policy == "OnFailure" and ended and not ended["exitCode"])
    return bool((ended and final) or _held_back(trainer))


def _held_back(container: Raw) -> Raw | None:
    """Return the last termination of a container that keeps failing, while the kubelet delays its next restart.

    The result is None if the container is in any other state.
    """
    waiting = (container.get("state") or {}).get("waiting") or {}
    last: Raw | None = (container.get("lastState") or {}).get("terminated")
    return last if waiting.get("reason") in _HELD_BACK else None


def _trainer(status: Raw) -> Raw:
    """Return the container status of the container `trainer`, or an empty mapping if there is none yet."""
    containers: Iterable[Raw] = status.get("containerStatuses") or ()
    return next((container for container in containers if container["name"] == TRAINER), {})


def _port(spec: Raw) -> int:
    declared = (port for container in spec.get("containers") or () for port in container.get("ports") or ())
    return next((port["containerPort"] for port in declared if port.get("name") == PORT_NAME), PORT)


def _requests(spec: Raw) -> Mapping[str, Decimal]:
    """Return the sum of the resource requests of all containers. Init containers are left out.

    For a container with limits only, the API server has already set the requests to these limits.
    """
    container_requests = [
        (container.get("resources") or {}).get("requests") or {} for container in spec.get("containers") or ()
    ]
    if len(container_requests) == 1:
        return amounts({"pods": 1, **container_requests[0]})
    total = {"pods": Decimal(1)}
    for requests in map(amounts, container_requests):
        for name, amount in requests.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _restarts(status: Raw) -> Raw:
    """Return the fields of PodView that describe restarts of the trainer container."""
    trainer = _trainer(status)
    ended = (trainer.get("lastState") or {}).get("terminated") or {}
    return {
        "restarts": trainer.get("restartCount") or 0,
        "last_exit_code": ended.get("exitCode"),
        "last_exit_reason": (ended.get("reason") or "")[:WORD],
    }


def _containers(status: Raw) -> list[Raw]:
    return [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]


def _names(taint: Raw) -> tuple[str, str]:
    return taint["key"], f"{taint['key']}={taint.get('value') or ''}"


def _grace(obj: Raw) -> float:
    """Return the pod's grace period in seconds: that of its deletion in progress, otherwise that of its spec.

    An eviction or a user may have shortened the grace period of the deletion.
    """
    deletion_grace = obj["metadata"].get("deletionGracePeriodSeconds")
    pod_grace = (obj.get("spec") or {}).get("terminationGracePeriodSeconds")
    return float(deletion_grace if deletion_grace is not None else 30 if pod_grace is None else pod_grace)


def _disruption(status: Raw) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return condition.get("reason") or "DisruptionTarget"
    return ""


def _number(text: str | None) -> int | None:
    return int(text) if text and _NUMBER.fullmatch(text) else None
