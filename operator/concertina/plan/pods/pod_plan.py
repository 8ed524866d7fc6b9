"""What becomes of a job's pods in a pass, and the actions and events that all launchers share."""

from __future__ import annotations

from dataclasses import dataclass

from concertina.plan.actions import Action, DeletePod, Event
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import PodView


@dataclass(frozen=True)
class PodPlan:
    actions: tuple[Action, ...] = ()
    attempts: tuple[int, ...] = ()
    """As status.internal.attempts: written before the pods are created, so that no name, by which agents are known, is
    used for two (decision "Attempts are written before pods")."""
    replaced: tuple[PodView, ...] = ()
    """The dead pods that get a successor in this pass."""
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    missing: bool = False
    """Whether pods are wanted that are not there."""


def replaced_event(ctx: JobContext, pod: PodView) -> Event:
    """Announce the successor of a pod. A deletion of the pod may belong to a foreground deletion of the job, of which
    the operator hears later."""
    notice = ctx.replicas.notices.get(pod.name)
    why = notice.message if notice else ctx.replicas.dead[pod.name]
    unless = " unless the job is deleted too" if pod.deleting else ""
    message = f"replica {pod.name} {why}; a new pod replaces it{unless}"
    return Event("Normal" if notice else "Warning", "ReplicaReplaced", message)


def delete(ctx: JobContext, pod: PodView, reason: str) -> list[Action]:
    """Nothing where it is being deleted already, unless it may be forgotten before its node says that it has ended:
    where the node is out of service, or does not answer and what runs there is fenced out, as the bundled trainer is
    (decision "Whose writers are not fenced is not forgotten")."""
    node = ctx.node(pod)
    force = node.out_of_service or (not node.ready and ctx.spec.bundled)
    if pod.deleting and not force:
        return []
    return [DeletePod(pod.name, pod.uid, f"replica {pod.name} {reason}", force)]
