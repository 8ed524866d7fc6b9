"""Plan for a job's pods, and the actions, events and attempt numbers that all launchers share."""

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
    """Attempts as in status.internal.attempts.

    They are written before the pods are created, so that no name is used twice: agents are known by name (decision
    "Attempts are written before pods").
    """
    replaced: tuple[PodView, ...] = ()
    """Dead pods that get a successor in this pass."""
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    missing: bool = False
    """Whether wanted pods do not exist."""


def replaced_event(ctx: JobContext, pod: PodView) -> Event:
    """Return the event that announces the successor of a pod.

    A deletion of the pod may be part of a foreground deletion of the job, which the operator learns of later.
    """
    notice = ctx.replicas.notices.get(pod.name)
    why = notice.message if notice else ctx.replicas.dead[pod.name]
    unless = " unless the job is deleted too" if pod.deleting else ""
    message = f"replica {pod.name} {why}; a new pod replaces it{unless}"
    return Event("Normal" if notice else "Warning", "ReplicaReplaced", message)


def delete(ctx: JobContext, pod: PodView, reason: str) -> list[Action]:
    """Return the deletion of a pod; nothing if the pod is being deleted already and can't be forced.

    A deletion is forced, so that the pod is forgotten before its node confirms its end, in two cases: if the node is
    out of service, or if it does not answer and the pod's writers are fenced out, as the bundled trainer's are
    (decision "Pods with unfenced writers on lost nodes").
    """
    node = ctx.node(pod)
    force = node.out_of_service or (not node.ready and ctx.spec.bundled)
    if pod.deleting and not force:
        return []
    return [DeletePod(pod.name, pod.uid, f"replica {pod.name} {reason}", force)]


# --- the attempts of replicas


def same_replica(first_name: str, second_name: str) -> bool:
    """Return whether two names are pods of the same index.

    The answer is False for a name that is no replica's: agents may invent names.
    """
    first, second = parse(first_name), parse(second_name)
    return first is not None and second is not None and first.index is not None and first.index == second.index


def number_at(numbers: Sequence[int], index: int | None) -> int:
    """Return the number at an index: 0 beyond the end, and for the pod of torchrun's store, which has no index."""
    return numbers[index] if index is not None and index < len(numbers) else 0


def packed(numbers: Mapping[int, int]) -> tuple[int, ...]:
    """Return the numbers by index, without the zeros at the end."""
    last = max((index for index, number in numbers.items() if number), default=-1)
    return tuple(numbers.get(index, 0) for index in range(last + 1))


def pass_over_taken(
    job: str, attempts: dict[int, int], wanted_indexes: Iterable[int], taken_names: Collection[str]
) -> None:
    """Advance the attempts of wanted indexes past names that other pods have.

    The operator does not wait for such a name: the pods of a deleted job of the same name may stay for as long as their
    node is away (decision "Names that are taken are passed over").
    """
    if taken_names:
        for index in wanted_indexes:
            while pod_name(job, index, attempts.get(index, 0)) in taken_names:
                attempts[index] = attempts.get(index, 0) + 1
