"""Restoration of a pod's state when the node agent starts.

The pod's containers ended when the node last ended. All functions are pure.
"""

from dataclasses import dataclass
from typing import Any

from concertina.local.node.node_status import ContainerState, now

Object = dict[str, Any]


@dataclass(frozen=True)
class RestoredContainers:
    """States of a pod's containers when the node agent starts, keyed by the container's name.

    If `over` is True, the pod has ended and is not started again.
    """

    states: dict[str, ContainerState]
    over: bool
    failure: tuple[str, str] | None
    """Reason and message of the pod's failure, if the pod had failed as a whole; otherwise None."""


def containers(pod: Object) -> RestoredContainers:
    """Return the restored states of a pod's containers.

    Containers of a new pod wait. Containers that were running have ended with exit code 255, as after a reboot of a
    node with a kubelet.
    """
    status = pod.get("status") or {}
    reported = {
        entry["name"]: entry
        for entry in (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    }
    inits = pod["spec"].get("initContainers") or []
    specs = inits + pod["spec"]["containers"]
    begun = any("running" in entry["state"] or "terminated" in entry["state"] for entry in reported.values())
    never_again = begun and pod["spec"].get("restartPolicy") == "Never"
    over = status.get("phase") in ("Succeeded", "Failed") or never_again
    waiting = "PodInitializing" if inits else "ContainerCreating"
    states = {spec["name"]: _state(spec, reported.get(spec["name"]), waiting, over) for spec in specs}
    if not over:
        for spec in inits:  # a new sandbox runs all init containers again
            _again(states[spec["name"]])
    failure_reason = status.get("phase") == "Failed" and status.get("reason")
    return RestoredContainers(states, over, (failure_reason, status.get("message") or "") if failure_reason else None)


def _state(spec: Object, reported: Object | None, waiting: str, over: bool) -> ContainerState:
    state = ContainerState(spec["name"], spec["image"], {"waiting": {"reason": waiting}})
    state.restarts_always = spec.get("restartPolicy") == "Always"
    if reported is None:
        return state
    state.restarts, state.last_state = reported["restartCount"], reported.get("lastState") or {}
    state.container_id = reported.get("containerID", "")
    before = reported["state"]
    if "terminated" in before:
        state.state = before
    elif "running" in before:
        state.state = {"terminated": _lost(before["running"]["startedAt"], state.container_id)}
    elif over:
        state.state = {"terminated": _lost(now(), "")}
    return state


def _lost(started: str, container_id: str) -> Object:
    identity = {"containerID": container_id} if container_id else {}
    return {"exitCode": 255, "reason": "Unknown", "startedAt": started, "finishedAt": now()} | identity


def _again(state: ContainerState) -> None:
    if "terminated" in state.state:
        state.last_state, state.restarts = dict(state.state), state.restarts + 1
        state.state = {"waiting": {"reason": "PodInitializing"}}
