"""The plan for a job's pods, and the actions, events and numbers of attempts that all launchers share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from concertina.api.pod_names import parse, pod_name
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


# --- the attempts of replicas


def same_replica(one: str, other: str) -> bool:
    """Whether these are pods of the same index; not for what is no replica's name: agents may make one up."""
    first, second = parse(one), parse(other)
    return first is not None and second is not None and first.index is not None and first.index == second.index


def number_at(numbers: Sequence[int], index: int | None) -> int:
    """Return the number at an index: 0 beyond the end, and for the pod of torchrun's store, which has no index."""
    return numbers[index] if index is not None and index < len(numbers) else 0


def packed(numbers: Mapping[int, int]) -> tuple[int, ...]:
    """Return the numbers by index, without the zeros at the end."""
    last = max((index for index, number in numbers.items() if number), default=-1)
    return tuple(numbers.get(index, 0) for index in range(last + 1))


def pass_over_taken(job: str, attempts: dict[int, int], wanted: Iterable[int], taken: Collection[str]) -> None:
    """Names that other pods hold are not waited for: those of a job that was deleted may stay as long as their node is
    away (decision "Names that are taken are passed over")."""
    if taken:
        for index in wanted:
            while pod_name(job, index, attempts.get(index, 0)) in taken:
                attempts[index] = attempts.get(index, 0) + 1
