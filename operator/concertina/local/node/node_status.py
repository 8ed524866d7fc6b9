"""Computation of the PodStatus of a pod from the states of its containers. All functions are pure."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


def now() -> str:
    """Return the current time in the format of the Kubernetes API."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ContainerState:
    """State of one container, as the pod's status reports it."""

    name: str
    image: str
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""
    restarts_always: bool = False  # a sidecar among the init containers

    @property
    def exit_code(self) -> int | None:
        """Exit code of a container that has ended and will not be restarted; None otherwise."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    @property
    def initialized(self) -> bool:
        """True if the next container may start after this init container."""
        return self.started if self.restarts_always else self.exit_code == 0

    def as_object(self) -> Object:
        """Return the container's entry for the status of its pod, as in the Kubernetes API."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image if self.container_id else "",
            "state": self.state,
            "lastState": self.last_state,
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
            **({"containerID": self.container_id} if self.container_id else {}),
        }


@dataclass(frozen=True)
class PodFacts:
    """Data from which a PodStatus is computed."""

    restart_policy: str
    host_ip: str
    pod_ip: str  # empty until the pod has one
    start_time: str
    inits: Sequence[ContainerState]
    mains: Sequence[ContainerState]
    deleted: bool = False
    failure: tuple[str, str] | None = None  # reason and message of a failure of the pod as a whole


def pod_status(facts: PodFacts, previous: Object) -> Object:
    """Return the new PodStatus. Conditions that do not change keep their transition time from `previous`."""
    phase = _phase(facts)
    status: Object = {
        "phase": phase,
        "startTime": facts.start_time,
        "hostIP": facts.host_ip,
        "hostIPs": [{"ip": facts.host_ip}],
        "conditions": _conditions(facts, phase, previous),
        "containerStatuses": [container.as_object() for container in facts.mains],
        "reason": facts.failure[0] if facts.failure else None,
        "message": facts.failure[1] if facts.failure else None,
    }
    if facts.inits:
        statuses_by_name = {container["name"]: container for container in previous.get("initContainerStatuses") or []}
        status["initContainerStatuses"] = [
            _init_status(container, statuses_by_name.get(container.name)) for container in facts.inits
        ]
    if facts.pod_ip:
        status |= {"podIP": facts.pod_ip, "podIPs": [{"ip": facts.pod_ip}]}
    return status


def _init_status(container: ContainerState, before: Object | None) -> Object:
    """Return the status of an init container.

    If a node fails and boots again, its pods run their init containers again. The API server refuses a status in which
    a successful init container runs or waits. The old status (`before`) is therefore returned until the container has
    ended again.
    """
    succeeded = before is not None and before["state"].get("terminated", {}).get("exitCode") == 0
    if before and succeeded and container.exit_code is None and not container.restarts_always:
        return before
    return container.as_object() | {"ready": container.initialized}


def _phase(facts: PodFacts) -> str:
    if facts.failure:
        return "Failed"
    if all(container.exit_code is not None for container in facts.mains):
        good = all(container.exit_code == 0 for container in facts.mains)
        final = facts.deleted or facts.restart_policy == "Never" or (good and facts.restart_policy == "OnFailure")
        return "Running" if not final else "Succeeded" if good else "Failed"
    if any(container.exit_code not in (None, 0) and not container.restarts_always for container in facts.inits):
        return "Failed" if facts.restart_policy == "Never" or facts.deleted else "Pending"
    fresh = [container for container in facts.mains if "waiting" in container.state and not container.last_state]
    return "Pending" if fresh or not all(container.initialized for container in facts.inits) else "Running"


def _conditions(facts: PodFacts, phase: str, previous: Object) -> list[Object]:
    not_initialized = [container.name for container in facts.inits if not container.initialized]
    not_ready = [container.name for container in facts.mains if not container.ready]
    initialized = _verdict(not_initialized, "ContainersNotInitialized", "containers with incomplete status: [{}]")
    ready = _verdict(not_ready, "ContainersNotReady", "containers with unready status: [{}]")
    if phase == "Succeeded":
        ready = ("False", "PodCompleted", None)
        initialized = ("True", "PodCompleted", None)
    elif phase == "Failed":
        ready = ("False", "PodFailed", None)
    sandbox = ("True" if facts.pod_ip and phase not in ("Succeeded", "Failed") else "False", None, None)
    verdicts = {
        "PodReadyToStartContainers": sandbox,
        "Initialized": initialized,
        "Ready": ready,
        "ContainersReady": ready,
    }
    conditions_by_type = {condition["type"]: condition for condition in previous.get("conditions") or []}
    return [_condition(kind, verdict, conditions_by_type.get(kind, {})) for kind, verdict in verdicts.items()]


def _verdict(names: list[str], reason: str, message: str) -> tuple[str, str | None, str | None]:
    return ("False", reason, message.format(" ".join(names))) if names else ("True", None, None)


def _condition(kind: str, verdict: tuple[str, str | None, str | None], before: Object) -> Object:
    status, reason, message = verdict
    since = before["lastTransitionTime"] if before.get("status") == status else now()
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastProbeTime": None,
        "lastTransitionTime": since,
    }
